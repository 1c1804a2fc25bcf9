"""One decision of a job as remedies try it: the `key=value` overrides of each of its values, the mildest change first.

one_key("optimizer.in_flight", (2, 1))     optimizer.in_flight=2 .. optimizer.in_flight=1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STEPS = 64
"""At most so many values of one key are told apart."""

Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Lever:
    """One decision: for each of its values the `key=value` overrides that state it, the mildest change first."""

    steps: tuple[Overrides, ...]

    @property
    def keys(self) -> frozenset[str]:
        """The keys it sets."""
        return frozenset(key_of(o) for o in self.steps[0])

    def __str__(self) -> str:
        ends = dict.fromkeys((self.steps[0], self.steps[-1]))
        return " .. ".join(" ".join(overrides) for overrides in ends)


def key_of(override: str) -> str:
    """The key of `key=value`."""
    return override.partition("=")[0]


def one_key(key: str, values: Sequence[object]) -> Lever:
    """One key; of many values evenly spread ones, and the last one."""
    return Lever(tuple((f"{key}={value}",) for value in spread(values)))


def spread(values: Sequence[Any]) -> Sequence[Any]:
    """At most STEPS of the values, evenly spread, with the last one."""
    stride = -(-len(values) // STEPS) or 1
    return values[::-1][::stride][::-1]


def size_text(gib: float) -> str:
    """A size as a value of a key in GiB: `27.04`, or `7.5MiB` where GiB would be unreadable."""
    return f"{gib:.10g}" if gib >= 1 else f"{gib * 1024:.10g}MiB"


def size_up(nbytes: int) -> float:
    """GiB that hold these bytes, rounded up to a hundredth of the unit that fits."""
    unit = 2**30 if nbytes >= 2**30 else 2**20
    return math.ceil(nbytes / unit * 100) / 100 * unit / 2**30
