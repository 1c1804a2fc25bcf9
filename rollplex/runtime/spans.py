"""What ran when: one span for every step of every process, on one clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollplex.backends.lanes import LaneSpan
from rollplex.ir.steps import Step
from rollplex.runtime.protocol import ProcessId


@dataclass(frozen=True)
class Span:
    """One executed step; CLOCK_MONOTONIC nanoseconds."""

    process: ProcessId
    iteration: int
    step: Step
    start_ns: int
    stop_ns: int

    @property
    def seconds(self) -> float:
        return (self.stop_ns - self.start_ns) / 1e9


@dataclass(frozen=True)
class Beside:
    """Work of a process that ran beside its steps, on a lane of its own."""

    process: ProcessId
    iteration: int
    span: LaneSpan


@dataclass
class Timeline:
    """All spans so far, and what ran beside them.

    Of each process: the step that it is in (between steps: was in last), and its last complete iteration.
    """

    programs: Mapping[ProcessId, Sequence[Step]]
    spans: list[Span] = field(default_factory=list)
    current: dict[ProcessId, tuple[int, Step]] = field(default_factory=dict)
    finished: dict[ProcessId, int] = field(default_factory=dict)
    lanes: list[Beside] = field(default_factory=list)

    def enter(self, process: ProcessId, iteration: int, index: int) -> Step:
        """A process begins a step of its program."""
        step = self.programs[process][index]
        self.current[process] = (iteration, step)
        return step

    def leave(self, process: ProcessId, iteration: int, index: int, start_ns: int, stop_ns: int) -> Span:
        """The step is done."""
        span = Span(process, iteration, self.programs[process][index], start_ns, stop_ns)
        self.spans.append(span)
        return span

    def rest(self, process: ProcessId, iteration: int, lanes: Iterable[LaneSpan] = ()) -> None:
        """The process is through with an iteration; `lanes` is what ran beside its steps."""
        self.lanes += (Beside(process, iteration, span) for span in lanes)
        self.current.pop(process, None)
        self.finished[process] = iteration
