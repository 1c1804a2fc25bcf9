"""The timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) opens: who did what when, written as it happens.

process     controller, train 0, rollout 0
track       steps      one slice a step
            windows    one slice a window
            lanes      load, update, store: the stages of each optimizer chunk, beside the steps
counter     bytes of HBM that a GPU holds, at its training rank
instants    the moment each barrier opened
arrows      from a signal to the waits it ends
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

from rollplex.backends.engine import EngineReport
from rollplex.ir.steps import Barrier, Run, Signal, Wait, describe
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.spans import Span

STEPS, WINDOWS = 1, 2
Event = dict[str, Any]


class TraceFile:
    """Appends each iteration when it ends: nothing grows in memory, and a killed run leaves all but the last bracket.

    Times are microseconds since the first step; when that was on CLOCK_MONOTONIC is an event of its own.
    """

    def __init__(self, path: Path, processes: Iterable[ProcessId]) -> None:
        self._trace = Trace(processes)
        self._file = path.open("w", encoding="utf-8")
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        self._between = "\n"

    def __enter__(self) -> TraceFile:
        self._append(self._trace.names())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with suppress(OSError) if error is not None else nullcontext():  # a full disk must not hide why the run ended
            self._file.write("\n]}\n")
            self._file.close()

    def write(self, spans: Sequence[Span], reports: Mapping[ProcessId, EngineReport]) -> None:
        """The steps of one iteration, or of a part of it, and the ledger logs that came with them."""
        self._append(self._trace.steps(spans))
        self._append(self._trace.lanes(reports))
        self._append(self._trace.counters(reports))
        self._file.flush()

    def _append(self, events: Iterable[Event]) -> None:
        for event in events:
            self._file.write(self._between + json.dumps(event))
            self._between = ",\n"


class Trace:
    """Makes the events of the Chrome trace format; the first span that it sees is time 0."""

    def __init__(self, processes: Iterable[ProcessId]) -> None:
        ordered = sorted(processes, key=lambda p: (p.kind != "controller", p.kind != "train", p))
        self._pids = {process: pid for pid, process in enumerate(ordered, start=1)}
        self._origin = -1
        self._arrows = 0
        self._lanes: dict[tuple[ProcessId, str], int] = {}

    def names(self) -> Iterator[Event]:
        """What the processes and their tracks are called."""
        for process, pid in self._pids.items():
            yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": str(process)}}
            yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
            for tid, name in ((STEPS, "steps"), (WINDOWS, "windows")):
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}

    def steps(self, spans: Sequence[Span]) -> Iterator[Event]:
        """Slices, instants and arrows of these spans, which are of one iteration."""
        if self._origin < 0:
            self._origin = min((span.entered_ns for span in spans), default=-1)
            clock = {"monotonic_ns": self._origin}  # what measures beside a run finds its windows by
            yield {"ph": "M", "pid": 1, "name": "time_0", "args": clock}
        for process, pid in self._pids.items():
            own = sorted((span for span in spans if span.process == process), key=lambda span: span.start_ns)
            for span in own:
                if span.held_ns:
                    args = {"iteration": span.iteration, "kind": "wait", "window": span.step.window}
                    yield self._slice(pid, STEPS, "wait for its turn", span.entered_ns, span.start_ns, args)
                yield self._slice(pid, STEPS, describe(span.step), span.start_ns, span.stop_ns, _arguments(span))
            yield from self._windows(pid, own)
            if process.kind == "controller":
                yield from self._barriers(pid, own)
        yield from self._signals(spans)

    def lanes(self, reports: Mapping[ProcessId, EngineReport]) -> Iterator[Event]:
        """Work beside the steps: a track for each lane of a process, in the order in which they were first at work."""
        for process, report in sorted(reports.items()):
            for span in sorted(report.lanes, key=lambda span: span.start_ns):
                pid, tid = self._pids[process], self._lanes.get((process, span.lane), 0)
                if not tid:
                    tid = WINDOWS + 1 + sum(other == process for other, _ in self._lanes)
                    self._lanes[process, span.lane] = tid
                    yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": span.lane}}
                yield self._slice(pid, tid, span.text, span.start_ns, span.stop_ns, {"kind": span.lane})

    def counters(self, reports: Mapping[ProcessId, EngineReport]) -> Iterator[Event]:
        """Bytes that each GPU holds after every change of its ledger."""
        logs: dict[int, list[Any]] = {}
        for process, report in reports.items():
            logs.setdefault(process.rank, []).extend(event for event in report.events if event.kind != "touch")
        for gpu, log in sorted(logs.items()):
            pid = self._pids[ProcessId("train", gpu)]
            for event in sorted(log, key=lambda event: event.seq):
                at = {"ts": self._us(event.ns), "pid": pid}
                yield {"ph": "C", "name": f"HBM bytes of gpu {gpu}", **at, "args": {"held": event.total}}

    def _us(self, ns: int) -> float:
        return max(ns - self._origin, 0) / 1e3  # engines hold their initial objects before the first step

    def _slice(self, pid: int, tid: int, name: str, start_ns: int, stop_ns: int, args: Event) -> Event:
        times = {"ts": self._us(start_ns), "dur": (stop_ns - start_ns) / 1e3}
        return {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "name": name,
            **times,
            "cat": args.get("kind", "window"),
            "args": args,
        }

    def _windows(self, pid: int, spans: Sequence[Span]) -> Iterator[Event]:
        """A window lasts from its first step to its last: waiting at its end is part of it."""
        for (iteration, window), run in groupby(spans, key=lambda span: (span.iteration, span.step.window)):
            steps = list(run)
            args = {"iteration": iteration}
            yield self._slice(pid, WINDOWS, window, steps[0].entered_ns, steps[-1].stop_ns, args)

    def _barriers(self, pid: int, spans: Sequence[Span]) -> Iterator[Event]:
        for span in spans:
            if isinstance(span.step, Barrier):
                at = {"ts": self._us(span.stop_ns), "pid": pid, "tid": STEPS}
                yield {"ph": "i", "s": "g", "name": span.step.name, **at, "args": {"iteration": span.iteration}}

    def _signals(self, spans: Sequence[Span]) -> Iterator[Event]:
        """One arrow from each signal to each wait for its event; it leaves and enters inside their slices.

        It enters in the middle: Perfetto cuts times to whole nanoseconds, and an end of a slice may fall short of its
        last one.
        """
        sent: dict[str, list[Span]] = {}
        for span in spans:
            if isinstance(span.step, Signal):
                sent.setdefault(span.step.event, []).append(span)
        for wait in spans:
            for signal in sent.get(wait.step.event, ()) if isinstance(wait.step, Wait) else ():
                self._arrows += 1
                arrow = {"cat": "signal", "name": "signal", "id": self._arrows, "tid": STEPS}
                at = (max(wait.start_ns, signal.start_ns) + wait.stop_ns) // 2
                yield {"ph": "s", **arrow, "pid": self._pids[signal.process], "ts": self._us(signal.start_ns)}
                yield {"ph": "f", "bp": "e", **arrow, "pid": self._pids[wait.process], "ts": self._us(at)}


def _arguments(span: Span) -> Event:
    step = span.step
    waits = isinstance(step, Wait | Barrier)
    args: Event = {"iteration": span.iteration, "kind": "wait" if waits else step.kind, "window": step.window}
    if isinstance(step, Run):
        args |= {"node": step.node, "reads": list(step.reads), "writes": list(step.writes)}
    return args
