"""The state contract: every object whose lifetime matters, who makes it, who uses it, and when it is last used.

One line an object, as the paper's Table 3: class, attached or not, producer, consumers. What is free to move (host,
dropped) is said here; where it goes is the residency pass's to decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rollplex.ir.module import Module
from rollplex.passes.inventory import Inventory
from rollplex.passes.state import Lifetimes


@dataclass(frozen=True)
class LifetimesPass:
    """List the state contract: class, producer, consumers, last use and bytes a GPU of every object."""

    name: ClassVar[str] = "lifetimes"
    makes: ClassVar[type] = Lifetimes

    def run(self, module: Module) -> Module:
        """Take the inventory under the job's schedule."""
        inventory = Inventory.of(module)
        return module.put(Lifetimes(inventory.objects(), inventory.choices()))
