"""Offsets by first fit: every item at the lowest address that is free for its whole life, in an order that learns.

After each round, items that end above the target move forward in the order (squeaky wheel, Joslin and Clements 1999),
so that what is hard to place is placed early. It gives solutions, not proofs: `offsets.py` has the bound and the proof.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rollplex.passes.offsets_data import Item, overlaps


@dataclass(frozen=True)
class FirstFit:
    """Items with their neighbours in time."""

    items: tuple[Item, ...]

    @cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """Items alive at some time together with each."""
        found: list[list[int]] = [[] for _ in self.items]
        for i, j in overlaps(self.items):
            found[i].append(j)
            found[j].append(i)
        return tuple(map(tuple, found))

    def place(self, order: Sequence[int]) -> list[int]:
        """Offsets of all items, placed in this order."""
        offsets = [-1] * len(self.items)
        for i in order:
            taken = sorted((offsets[j], offsets[j] + self.items[j].size) for j in self.neighbours[i] if offsets[j] >= 0)
            at, size = 0, self.items[i].size
            for start, stop in taken:
                if start - at >= size:
                    break
                at = max(at, stop)
            offsets[i] = at
        return offsets

    def top(self, offsets: Sequence[int]) -> int:
        """The end of the highest item."""
        return max((o + item.size for o, item in zip(offsets, self.items, strict=True)), default=0)

    def search(self, target: int, rounds: int, seed: int, stop: Callable[[], bool] = bool) -> list[int]:
        """The lowest placement found in so many rounds, or the first that ends at `target`."""
        rng = random.Random(seed)
        best: list[int] = []
        for weight in WEIGHTS:
            key = {i: weight(item) for i, item in enumerate(self.items)}
            found = self._rounds(key, target, rounds, rng, stop)
            if not best or self.top(found) < self.top(best):
                best = found
            if self.top(best) <= target or stop():
                break
        return best

    def _rounds(
        self, key: dict[int, float], target: int, rounds: int, rng: random.Random, stop: Callable[[], bool]
    ) -> list[int]:
        best: list[int] = []
        most = max(key.values(), default=0.0) or 1.0
        for _ in range(rounds):
            offsets = self.place(sorted(key, key=key.__getitem__, reverse=True))
            if not best or self.top(offsets) < self.top(best):
                best = offsets
            if self.top(best) <= target or stop():
                break
            self._blame(key, offsets, target, most, rng)
        return best

    def _blame(
        self, key: dict[int, float], offsets: Sequence[int], target: int, most: float, rng: random.Random
    ) -> None:
        """Raise what ends above the target, by some part of the largest weight."""
        for i, item in enumerate(self.items):
            if offsets[i] + item.size > target:
                key[i] += most * rng.uniform(0.05, 0.3)


WEIGHTS: tuple[Callable[[Item], float], ...] = (
    lambda item: float(item.size * item.life),
    lambda item: float(item.size),
    lambda item: float(item.life),
)
