"""The state contract: every object whose lifetime matters, who makes it, who uses it, and when it is last used.

One line an object, as the paper's Table 3: class, attached or not, producer, consumers. What is free to move (host,
dropped) is said here; where it goes is the residency pass's to decide.

actor.snapshot          15.262 GiB  regenerable            start -> P1 prefix-reference, .. P3 publish
reference.boundary       8.000 GiB  boundary               P1 prefix-reference -> .. P2 score-reference
actor.prefix_saved      21.314 GiB  phase-local  attached  P1 prefix-actor -> .. P2 train-actor
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rollplex.ir.module import Module
from rollplex.passes.inventory import Inventory
from rollplex.passes.layout import Layout
from rollplex.passes.schedule import Schedule
from rollplex.passes.state import HeldSizes, Lifetimes


@dataclass(frozen=True)
class LifetimesPass:
    """List the state contract: class, producer, consumers, last use and bytes a GPU of every object.

    Job keys: `model`, `roles`, `workload`, `schedule`, `ablate`, `optimizer.in_flight`.
    """

    name: ClassVar[str] = "lifetimes"
    needs: ClassVar[tuple[type, ...]] = (Schedule, Layout, HeldSizes)
    makes: ClassVar[type] = Lifetimes

    def run(self, module: Module) -> Module:
        """Take the inventory under the job's schedule."""
        inventory = Inventory.of(module)
        return module.put(Lifetimes(inventory.objects(), inventory.choices()))
