"""A measured curve: straight lines between its points, over the logarithm of what was varied; its ends go on level.

Curve.of([(4, 1.0), (64, 3.0)])(16) == 2.0
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Points (logarithm of x, y), x rising."""

    logs: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Through (x, y), x above 0 and each once."""
        found = sorted(points)
        return cls(tuple(math.log(x) for x, _ in found), tuple(y for _, y in found))

    def __call__(self, x: float) -> float:
        """y at x."""
        return between(self.logs, self.values, math.log(x)) if x > 0 else self.values[0]


def between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """y at x on the straight lines through (xs, ys), xs rising; beyond them that of the nearest end."""
    i = bisect_right(xs, x)
    if i in (0, len(xs)):
        return ys[0] if i == 0 else ys[-1]
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])
