"""The cells of the fault matrix: which process is struck, where, by what.

train        run suffix         SIGKILL      every kind of step of every process, in the second of three iterations
train        chunks 0 and 1     SIGKILL      between two writes of a snapshot whose pages come one by one
controller   checkpoint         full disk
all          train-0.safetensors truncated   a checkpoint of a run that was killed
controller   P2                 second run   on the directory of one that goes on
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollplex.ir.plan import Plan
from rollplex.ir.steps import Barrier, Run, Step, UpdateChunk, Wait

STEPS = 3
SILENT_S, STEP_S = 5.0, 8.0  # run.silent_s and run.step_timeout_s
KINDS = ("controller", "train", "rollout")
FILES = ("checkpoint.json", *(f"{kind}-0.safetensors" for kind in KINDS))


@dataclass(frozen=True)
class Cell:
    """One cell: `index` is the step of the process' program that is struck in `iteration`."""

    process: str
    where: str
    fault: str
    index: int = -1
    iteration: int = 1

    @property
    def resumes(self) -> bool:
        """Whether the run has a rest to be resumed."""
        return self.where != "every checkpoint" and not self.fault.startswith("second")

    def __str__(self) -> str:
        return f"{self.process:<11} {self.where:<23} {self.fault:<16}"


def cells(plan: Plan) -> list[Cell]:
    """All of them, in the order of the table."""
    return [*_steps(plan), *_between(plan), *_first(plan), *_disks(), *_broken(), *_second()]


def _steps(plan: Plan) -> Iterator[Cell]:
    """Nothing limits how long a process waits, so it cannot hang there; the controller works in its tasks alone."""
    for kind in KINDS:
        for label, index in _by_label(plan.programs[kind]).items():
            step = plan.programs[kind][index]
            works = isinstance(step, Run) if kind == "controller" else not isinstance(step, Wait | Barrier)
            for fault in ("SIGKILL", "SIGSTOP", "exception", *(["hang"] if works else [])):
                yield Cell(kind, label, fault, index)


def _between(plan: Plan) -> Iterator[Cell]:
    """Behind the writes of a chunk of a snapshot that was released, before those of the next: its pages mix both."""
    chunks = [i for i, step in enumerate(plan.programs["train"]) if isinstance(step, UpdateChunk)]
    for k in dict.fromkeys((0, len(chunks) // 2, len(chunks) - 2)):
        for fault in ("SIGKILL", "exception"):
            yield Cell("train", f"chunks {k} and {k + 1}", fault, chunks[k] + 1)


def _first(plan: Plan) -> Iterator[Cell]:
    """Before there is a checkpoint."""
    for kind in KINDS:
        yield Cell(kind, "first iteration", "SIGKILL", len(plan.programs[kind]) // 2, 0)


def _disks() -> Iterator[Cell]:
    for kind in KINDS:
        yield Cell(kind, "checkpoint", "full disk")
    yield Cell("train", "final weights", "full disk")


def _broken() -> Iterator[Cell]:
    for name in FILES:
        for how in ("truncated", "one bit changed", "removed"):
            yield Cell("all", name, how)
    yield Cell("all", "checkpoint.json", "of another plan")
    yield Cell("all", "every checkpoint", "truncated")


def _second() -> Iterator[Cell]:
    for phase in ("P1", "P2", "P3"):
        for how in ("second run", "second --resume"):
            yield Cell("controller", phase, how)


def _by_label(program: tuple[Step, ...]) -> dict[str, int]:
    """The first step of every kind; tasks are kinds of their own."""
    found: dict[str, int] = {}
    for index, step in enumerate(program):
        found.setdefault(f"run {step.task}" if isinstance(step, Run) else step.kind, index)
    return found
