"""Which rows of the data each step samples for.

order of the epochs    a b c d e f g h i ..                           a seeded permutation an epoch, end to end
full, oversample       step 0: a b c d      step 1: e f g h           fresh rows; what oversampling leaves is gone
partial                step 0: a b c d      step 1: b d e f           b and d were left unfinished: they go on
rounds of sampling     step 0: a b c d      step 1: f g h i           b taught nothing, e was sampled for in its place

Rows are dealt out to rollout engines in equal shares. What an engine has left goes on in the same engine, which holds
its responses: there it comes before new rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from rollplex.ir.job import Job


class StepRows:
    """Places of rows in the data, step by step; of a step after unfinished ones, once it is told what they left."""

    def __init__(self, job: Job, rows: int) -> None:
        self.job, self.rows = job, rows
        self._carries = job.workload.rollout.kind == "partial"
        self._left: dict[int, list[list[int]]] = {0: [[] for _ in range(job.engines)]}

    def of(self, step: int) -> list[int]:
        """Places of the rows that a step samples for, engine after engine."""
        job = self.job
        if not self._carries:
            return self._fresh(step * job.sampled, job.sampled)
        assert step in self._left, f"what step {step - 1} leaves is not known yet"
        prompts, left = job.workload.prompts, job.sampled - job.workload.prompts
        fresh = self._fresh(step * prompts + left, prompts) if step else self._fresh(0, job.sampled)
        each = len(fresh) // job.engines
        shares = [fresh[e * each : (e + 1) * each] for e in range(job.engines)]
        return [row for old, new in zip(self._left[step], shares, strict=True) for row in (*old, *new)]

    def took(self, step: int, taken: Sequence[int]) -> None:
        """The numbers of the rows, among those sampled for, that a step has taken: the others go on in the next one."""
        if not self._carries:
            return
        rows, gone = self.of(step), set(taken)
        each = len(rows) // self.job.engines
        shares = [range(e * each, (e + 1) * each) for e in range(self.job.engines)]
        left = [[rows[i] for i in share if i not in gone] for share in shares]
        self._left = {step: self._left[step], step + 1: left}

    def carried(self, step: int) -> list[list[int]]:
        """What goes on in a step, by engine: all that this object needs to begin there."""
        return self._left.get(step, [[] for _ in range(self.job.engines)])

    def begin(self, step: int, carried: list[list[int]]) -> None:
        """Begin at a step with what was carried into it."""
        self._left = {step: carried}

    def _fresh(self, start: int, count: int) -> list[int]:
        return fresh_rows(self.job, self.rows, start, count)


class RoundRows:
    """Places of rows where a step samples again: the next step begins behind the last row that this one drew."""

    def __init__(self, job: Job, rows: int) -> None:
        self.job, self.rows = job, rows
        self._drawn = {-1: 0}
        self._now: dict[int, list[int]] = {}

    def of(self, step: int) -> list[int]:
        """Places of the rows that a step samples for at present, by the numbers of its prompts."""
        if step not in self._now:
            self._now = {k: rows for k, rows in self._now.items() if k == step - 1}  # which may still be asked for
            self._drawn = {k: drawn for k, drawn in self._drawn.items() if k == step - 1}
            self._now[step] = self._draw(step, self._drawn[step - 1], self.job.workload.prompts)
        return list(self._now[step])

    def again(self, step: int, numbers: Sequence[int]) -> list[int]:
        """The next rows of the data, in place of those at these numbers."""
        fresh = self._draw(step, self._drawn[step], len(numbers))
        for number, place in zip(numbers, fresh, strict=True):
            self._now[step][number] = place
        return fresh

    def took(self, step: int, taken: Sequence[int]) -> None:
        """Nothing: what taught nothing is not sampled for again, and all else is taken."""

    def carried(self, step: int) -> int:
        """How many rows have been drawn before a step: all that this object needs to begin there."""
        return self._drawn[step - 1]

    def begin(self, step: int, carried: int) -> None:
        """Begin at a step before which so many rows have been drawn."""
        self._drawn, self._now = {step - 1: carried}, {}

    def _draw(self, step: int, start: int, count: int) -> list[int]:
        self._drawn[step] = start + count
        return fresh_rows(self.job, self.rows, start, count)


def fresh_rows(job: Job, rows: int, start: int, count: int) -> list[int]:
    """Rows [start, start + count) of the epochs, end to end."""
    places = (divmod(place, rows) for place in range(start, start + count))
    return [_epoch(rows, job.run.seed, epoch)[at] for epoch, at in places]


@lru_cache(2)
def _epoch(rows: int, seed: int, epoch: int) -> list[int]:
    """The data order of one epoch: a permutation of its own."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(rows, generator=generator).tolist()
