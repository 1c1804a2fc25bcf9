"""The timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) opens: who did what when, over all iterations.

process     controller, train 0, rollout 0
track       steps      one slice a step: `run generate rollout mb 0`
            windows    one slice a window: P1 prefix-actor
            lanes      load, update, store: the stages of each optimizer chunk, beside the steps
instants    the moment each barrier opened
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rollplex.ir.steps import Barrier, Run, Wait, describe
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.spans import Beside, Span

STEPS, WINDOWS = 1, 2


def write_trace(spans: Iterable[Span], path: Path, lanes: Sequence[Beside] = ()) -> None:
    """Write the trace; times are microseconds since the first step."""
    path.write_text(json.dumps({"traceEvents": list(trace_events(list(spans), lanes)), "displayTimeUnit": "ms"}))


def trace_events(spans: list[Span], lanes: Sequence[Beside] = ()) -> Iterator[dict[str, Any]]:
    """The events of the Chrome trace format."""
    origin = min((span.start_ns for span in spans), default=0)
    processes = sorted({span.process for span in spans}, key=lambda p: (p.kind != "controller", p.kind != "train", p))
    for pid, process in enumerate(processes, start=1):
        yield from _names(pid, process)
        own = sorted((span for span in spans if span.process == process), key=lambda span: span.start_ns)
        for span in own:
            yield _slice(pid, STEPS, describe(span.step), span.start_ns, span.stop_ns, origin, _arguments(span))
        yield from _windows(pid, own, origin)
        yield from _lanes(pid, [beside for beside in lanes if beside.process == process], origin)
        if process.kind == "controller":
            yield from _barriers(pid, own, origin)


def _names(pid: int, process: ProcessId) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": str(process)}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, name in ((STEPS, "steps"), (WINDOWS, "windows")):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _slice(
    pid: int, tid: int, name: str, start_ns: int, stop_ns: int, origin: int, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": (start_ns - origin) / 1e3, "dur": (stop_ns - start_ns) / 1e3}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, "cat": args.get("kind", "window"), "args": args}


def _arguments(span: Span) -> dict[str, Any]:
    step = span.step
    waits = isinstance(step, Wait | Barrier)
    args: dict[str, Any] = {"iteration": span.iteration, "kind": "wait" if waits else step.kind, "window": step.window}
    if isinstance(step, Run):
        args |= {"node": step.node, "reads": list(step.reads), "writes": list(step.writes)}
    return args


def _windows(pid: int, spans: list[Span], origin: int) -> Iterator[dict[str, Any]]:
    """A window lasts from its first step to its last: waiting at its end is part of it."""
    for (iteration, window), run in groupby(spans, key=lambda span: (span.iteration, span.step.window)):
        steps = list(run)
        args = {"iteration": iteration}
        yield _slice(pid, WINDOWS, window, steps[0].start_ns, steps[-1].stop_ns, origin, args)


def _lanes(pid: int, lanes: list[Beside], origin: int) -> Iterator[dict[str, Any]]:
    """A track for each lane, in the order in which they were first at work."""
    names = list(dict.fromkeys(beside.span.lane for beside in sorted(lanes, key=lambda b: b.span.start_ns)))
    for tid, name in enumerate(names, start=WINDOWS + 1):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for beside in (b for b in lanes if b.span.lane == name):
            span, args = beside.span, {"iteration": beside.iteration, "kind": name}
            yield _slice(pid, tid, span.text, span.start_ns, span.stop_ns, origin, args)


def _barriers(pid: int, spans: list[Span], origin: int) -> Iterator[dict[str, Any]]:
    for span in spans:
        if isinstance(span.step, Barrier):
            at = {"ts": (span.stop_ns - origin) / 1e3, "pid": pid, "tid": STEPS}
            yield {"ph": "i", "s": "g", "name": span.step.name, **at, "args": {"iteration": span.iteration}}
