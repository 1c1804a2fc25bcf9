"""Lower the schedule to one program of steps for each kind of process: what the runtime executes, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rollplex.ir.module import Module
from rollplex.ir.steps import Step
from rollplex.passes.lower_peers import ControllerProgram, RolloutProgram
from rollplex.passes.lower_train import TrainProgram


@dataclass(frozen=True)
class Programs:
    """The steps of every process kind."""

    made_by: ClassVar[str] = "lower"
    steps: dict[str, tuple[Step, ...]]

    def __str__(self) -> str:
        return "\n".join(f"{name:<12} {len(steps)} steps" for name, steps in self.steps.items())


@dataclass(frozen=True)
class LowerPass:
    """Write one program of steps for each kind of process."""

    name: ClassVar[str] = "lower"
    makes: ClassVar[type] = Programs

    def run(self, module: Module) -> Module:
        """Lower; the result is for the checker to judge."""
        makers = {"controller": ControllerProgram, "train": TrainProgram, "rollout": RolloutProgram}
        return module.put(Programs({kind: tuple(make(module).steps()) for kind, make in makers.items()}))
