"""Where things stand in the pictures: windows along x in proportion to their seconds, bytes along y in round steps.

A window that is too short to be seen is widened to a least width; the others share the rest in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollplex.ir.plan import Plan
from rollplex.show.text import Unit

LEFT, RIGHT, WIDTH, LEAST = 104.0, 20.0, 1160.0, 36.0


@dataclass(frozen=True)
class Span:
    """A window's place along x."""

    name: str
    phase: str
    x: float
    width: float
    seconds: float
    widened: bool

    @property
    def end(self) -> float:
        """Its right edge."""
        return self.x + self.width


@dataclass(frozen=True)
class TimeScale:
    """All windows along x; `width` is that of the whole picture."""

    spans: tuple[Span, ...]
    width: float

    def span(self, window: str) -> Span:
        """The place of a window."""
        return next(s for s in self.spans if s.name == window)

    def phases(self) -> list[tuple[str, float, float]]:
        """(phase, from, to) of each run of windows of one phase."""
        found: list[tuple[str, float, float]] = []
        for s in self.spans:
            if found and found[-1][0] == s.phase:
                found[-1] = (s.phase, found[-1][1], s.end)
            else:
                found.append((s.phase, s.x, s.end))
        return found


def time_scale(plan: Plan) -> TimeScale:
    """The windows of a plan."""
    windows = plan.summary.windows
    room = max(WIDTH - LEFT - RIGHT, LEAST * len(windows))
    widths = shares([w.seconds for w in windows], room, LEAST)
    spans, x = [], LEFT
    for w, width in zip(windows, widths, strict=True):
        total = sum(v.seconds for v in windows)
        widened = width > w.seconds / total * room * 1.01 if total else False
        spans.append(Span(w.name, w.phase, x, width, w.seconds, widened))
        x += width
    return TimeScale(tuple(spans), x + RIGHT)


def shares(values: Sequence[float], room: float, least: float) -> list[float]:
    """`room` dealt out in proportion to values, nobody below `least`."""
    short: set[int] = set()
    while True:
        left = room - least * len(short)
        total = sum(v for i, v in enumerate(values) if i not in short)
        rate = left / total if total else 0.0
        new = {i for i, v in enumerate(values) if i not in short and v * rate < least}
        if not new:
            return [least if i in short else v * rate for i, v in enumerate(values)]
        short |= new


@dataclass(frozen=True)
class ByteScale:
    """Bytes along y: `top` pixels is `most` bytes, `bottom` is none."""

    most: float
    top: float
    bottom: float

    def y(self, nbytes: float) -> float:
        """The height at which a number of bytes stands."""
        return self.bottom - (self.bottom - self.top) * nbytes / self.most

    def ticks(self, unit: Unit, count: int = 5) -> list[float]:
        """Round numbers of the unit, from 0, at most about `count` of them."""
        step = round_step(self.most / unit.nbytes / count) * unit.nbytes
        return [i * step for i in range(int(self.most / step) + 1)]


def round_step(value: float) -> float:
    """1, 2, 5 or 10 times a power of ten that is not below the value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * 0.999)
