"""Lower the schedule to one program of steps for each kind of process: what the runtime executes, step by step.

before    reference.weights    hbm in P1 prefix-reference, host in P1 prefix-actor
after     train    map reference.weights  fetch reference.weights  run prefix(reference)  unmap reference.weights  ..

The programs of controller, training and rollout ranks meet in signals, waits and barriers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rollplex.ir.module import Module
from rollplex.ir.steps import Step
from rollplex.passes.chunk_sizes import Chunks
from rollplex.passes.layout import Layout
from rollplex.passes.lower_peers import ControllerProgram, RolloutProgram
from rollplex.passes.lower_train import TrainProgram
from rollplex.passes.residency import Residency
from rollplex.passes.schedule import Schedule
from rollplex.passes.state import Lifetimes


@dataclass(frozen=True)
class Programs:
    """The steps of every process kind."""

    made_by: ClassVar[str] = "lower"
    steps: dict[str, tuple[Step, ...]]

    def __str__(self) -> str:
        return "\n".join(f"{name:<12} {len(steps)} steps" for name, steps in self.steps.items())


@dataclass(frozen=True)
class LowerPass:
    """Write one program of steps for each kind of process.

    Job keys: none; everything has been decided.
    """

    name: ClassVar[str] = "lower"
    needs: ClassVar[tuple[type, ...]] = (Schedule, Layout, Lifetimes, Residency, Chunks)
    makes: ClassVar[type] = Programs

    def run(self, module: Module) -> Module:
        """Lower; the result is for the checker to judge."""
        makers = {"controller": ControllerProgram, "train": TrainProgram, "rollout": RolloutProgram}
        return module.put(Programs({kind: tuple(make(module).steps()) for kind, make in makers.items()}))
