"""What Perfetto's importer of Chrome traces makes of one, as far as it drops things without a word.

Times become whole nanoseconds, cut off; events are sorted by them, those of one time stay as they came. A slice closes
what has ended on its track and must end before what is still open; an arrow's ends bind to the innermost open slice.
https://perfetto.dev/docs/getting-started/other-formats; Trace Event Format, sections on duration, flow, counter events
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from numbers import Real
from typing import Any

Event = dict[str, Any]
Track = tuple[int, int]


def dropped(events: Iterable[Event]) -> list[str]:
    """A line for everything that would not be shown."""
    events = list(events)
    return list(_malformed(events)) or [*_nameless(events), *_unshown(events)]


def _malformed(events: list[Event]) -> Iterator[str]:
    """Fields that an event of its kind must have."""
    needs = {"X": {"tid", "ts", "dur"}, "i": {"s", "ts"}, "C": {"ts", "args"}, "M": {"args"}}
    needs |= {end: {"tid", "ts", "id", "cat"} for end in "sf"}
    for event in events:
        missing = {"pid", "name", *needs[event["ph"]]} - event.keys()
        if missing or not all(math.isfinite(event[key]) and event[key] >= 0 for key in ("ts", "dur") if key in event):
            yield f"without {sorted(missing)} or at no time: {event}"
        if event["ph"] == "C" and not all(isinstance(value, Real) for value in event["args"].values()):
            yield f"a counter of no number: {event}"


def _nameless(events: list[Event]) -> Iterator[str]:
    """Every process and track is named once, before anything is on it."""
    named: set[int | Track] = set()
    for event in events:
        place = event["pid"] if event["name"] == "process_name" else (event["pid"], event.get("tid", 0))
        if event["name"] in ("process_name", "thread_name"):
            if place in named:
                yield f"named twice: {event}"
            named.add(place)
        elif event["ph"] in "Xsf" and not {event["pid"], place} <= named:
            yield f"on a track without a name: {event}"


def _unshown(events: list[Event]) -> Iterator[str]:
    """Slices that overlap without nesting, arrows whose ends meet no slice or have no partner."""
    timed = sorted(((_ns(event["ts"]), event) for event in events if event["ph"] in "Xsf"), key=lambda pair: pair[0])
    stacks: dict[Track, list[int]] = {}
    begun: dict[Any, int] = {}
    for ts, event in timed:
        stack = stacks.setdefault((event["pid"], event["tid"]), [])
        while stack and stack[-1] <= ts:
            stack.pop()
        if event["ph"] == "X":
            end = ts + _ns(event["dur"])
            if stack and end > stack[-1]:
                yield f"overlaps what began before it: {event}"
            stack.append(end)
        elif not stack:
            yield f"an arrow's end on no slice: {event}"
        key = (event["cat"], event["name"], event["id"]) if event["ph"] in "sf" else None
        if event["ph"] == "s":
            begun[key] = begun.get(key, 0) + 1
        elif event["ph"] == "f" and not begun.pop(key, 0):
            yield f"an arrow that comes from nowhere: {event}"
    yield from (f"an arrow that leads nowhere: {key}" for key in begun)


def _ns(us: float) -> int:
    return int(us * 1000.0)
