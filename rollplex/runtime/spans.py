"""What ran when: one span for every step of every process, on one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollplex.ir.steps import Step
from rollplex.runtime.protocol import ProcessId


@dataclass(frozen=True)
class Span:
    """One executed step; CLOCK_MONOTONIC nanoseconds. Before it began it waited `held_ns` for its turn."""

    process: ProcessId
    iteration: int
    step: Step
    start_ns: int
    stop_ns: int
    held_ns: int = 0

    @property
    def seconds(self) -> float:
        return (self.stop_ns - self.start_ns) / 1e9

    @property
    def held_s(self) -> float:
        return self.held_ns / 1e9

    @property
    def entered_ns(self) -> int:
        """When it would have begun, had nothing held it back."""
        return self.start_ns - self.held_ns


@dataclass
class Timeline:
    """Spans not yet taken; the step each process is in (between steps: was in last) with what its lanes are at, and its
    last complete iteration.
    """

    programs: Mapping[ProcessId, Sequence[Step]]
    spans: list[Span] = field(default_factory=list)
    current: dict[ProcessId, tuple[int, Step]] = field(default_factory=dict)
    lanes: dict[ProcessId, dict[str, str]] = field(default_factory=dict)
    finished: dict[ProcessId, int] = field(default_factory=dict)

    def enter(self, process: ProcessId, iteration: int, index: int) -> Step:
        """A process begins a step of its program."""
        step = self.programs[process][index]
        self.current[process] = (iteration, step)
        return step

    def stage(self, process: ProcessId, lane: str, text: str) -> None:
        """A lane of a process begins some work, or is done where there is no text."""
        at_work = self.lanes.setdefault(process, {})
        at_work.pop(lane, None)
        if text:
            at_work[lane] = text

    def leave(self, process: ProcessId, iteration: int, index: int, start_ns: int, stop_ns: int, held_ns: int) -> Span:
        """The step is done."""
        span = Span(process, iteration, self.programs[process][index], start_ns, stop_ns, held_ns)
        self.spans.append(span)
        return span

    def take(self) -> list[Span]:
        """The spans since the last call: a long run does not keep them."""
        taken, self.spans = self.spans, []
        return taken

    def rest(self, process: ProcessId, iteration: int) -> None:
        """The process is through with an iteration."""
        self.current.pop(process, None)
        self.finished[process] = iteration
