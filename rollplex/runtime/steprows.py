"""Which rows of the data each step samples for.

order of the epochs    a b c d e f g h i ..                           a seeded permutation an epoch, end to end
full, oversample       step 0: a b c d      step 1: e f g h           fresh rows; what oversampling leaves is gone
partial                step 0: a b c d      step 1: b d e f           b and d were left unfinished: they go on

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
        self._left[step + 1] = [[rows[i] for i in share if i not in gone] for share in shares]

    def carried(self, step: int) -> list[list[int]]:
        """What goes on in a step, by engine: all that this object needs to begin there."""
        return self._left.get(step, [[] for _ in range(self.job.engines)])

    def begin(self, step: int, carried: list[list[int]]) -> None:
        """Begin at a step with what was carried into it."""
        self._left = {step: carried}

    def _fresh(self, start: int, count: int) -> list[int]:
        """Rows [start, start + count) of the epochs, end to end."""
        places = (divmod(place, self.rows) for place in range(start, start + count))
        return [_epoch(self.rows, self.job.run.seed, epoch)[at] for epoch, at in places]


@lru_cache(2)
def _epoch(rows: int, seed: int, epoch: int) -> list[int]:
    """The data order of one epoch: a permutation of its own."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(rows, generator=generator).tolist()
