"""How long a peer has been silent, counted only while this process itself was running.

A laptop that sleeps, or a run stopped by Ctrl-Z, stops everyone: the clock jumps, and nobody is to blame for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TICK_S = 0.2


class Silence:
    """Counts silence in looks: a gap between two looks longer than a few ticks was our own absence."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._looked = clock()
        self._silent_s = 0.0

    def heard(self) -> None:
        """The peer said something."""
        self._silent_s = 0.0

    def too_long(self) -> bool:
        """Look: whether the peer has now been silent for longer than the limit."""
        now = self._clock()
        self._silent_s += min(now - self._looked, 5 * TICK_S)
        self._looked = now
        return self._silent_s > self.limit_s
