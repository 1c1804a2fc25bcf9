"""What a run tells its caller while it goes on: a closed union, for a progress bar, a log, or a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollplex.ir.errors import Problem
from rollplex.ir.steps import Step
from rollplex.runtime.protocol import ProcessId


@dataclass(frozen=True)
class Started:
    """The engine processes exist (they are still building their engines)."""

    pids: Mapping[ProcessId, int]


@dataclass(frozen=True)
class StageBegun:
    """Before the first step or behind the last, a process begins something that may take seconds."""

    process: ProcessId
    stage: str


@dataclass(frozen=True)
class EnginesReady:
    """Every engine holds its initial state; iterations begin."""

    steps: int


@dataclass(frozen=True)
class Resumed:
    """The run goes on after `step` iterations; newer checkpoints were skipped for these reasons."""

    step: int
    skipped: tuple[Problem, ...]


@dataclass(frozen=True)
class CheckpointWritten:
    """The state after `step` iterations is on disk."""

    step: int
    seconds: float


@dataclass(frozen=True)
class StepEntered:
    """A process begins a step of its program."""

    process: ProcessId
    iteration: int
    step: Step


@dataclass(frozen=True)
class IterationDone:
    """One iteration is complete, theta_k+1 is published."""

    iteration: int
    steps: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Stopping:
    """SIGINT: the run ends after this iteration."""

    iteration: int


RunEvent = Started | StageBegun | Resumed | EnginesReady | CheckpointWritten | StepEntered | IterationDone | Stopping
Progress = Callable[[RunEvent], None]


def silent(event: RunEvent) -> None:
    """A Progress that says nothing."""
