"""Sets of time intervals: how long one kind of work ran, and how much of it inside another."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set as intervals that do not touch, in order."""
    out: list[Interval] = []
    for start, stop in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def length(intervals: Iterable[Interval]) -> int:
    """Time covered by at least one of them."""
    return sum(stop - start for start, stop in merged(intervals))


def common(some: Iterable[Interval], others: Iterable[Interval]) -> int:
    """Time covered by both sets."""
    a, b = merged(some), merged(others)
    return sum(max(0, min(s, t) - max(p, q)) for p, s in a for q, t in b)
