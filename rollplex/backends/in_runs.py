"""A backward over sequences that share keys and values, some sequences at a time.

run 0   responses 0, 1   rows    0 .. 20480    gradients of their own rows      gradients of the shared keys, values
run 1   responses 2, 3   rows 20480 .. 40960   end to end with those before     added to those before, in FP32
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Gradients = Sequence[Tensor]
"""Of a run's own rows, then of what all runs share."""


def in_runs(
    runs: Sequence[tuple[slice, slice]],
    backward: Callable[[slice, slice], Gradients],
    own: Sequence[Tensor],
    shared: Sequence[Tensor],
) -> Gradients:
    """Gradients of `own` and `shared` from `backward(sequences, rows)` of each run.

    Rows cut the first dimension of `own`. Sums over runs are at least FP32, in the order of runs, and rounded once. A
    single run's gradients are returned as they are.
    """
    if len(runs) == 1:
        return backward(*runs[0])
    found = [torch.empty_like(x) for x in own]
    sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in shared]
    for sequences, rows in runs:
        _add([x[rows] for x in found], sums, backward(sequences, rows))
    return [*found, *(x.to(like.dtype) for x, like in zip(sums, shared, strict=True))]


def _add(found: Sequence[Tensor], sums: Sequence[Tensor], gradients: Gradients) -> None:
    """A run's gradients end with this call: the next run has their memory."""
    for place, gradient in zip(found, gradients[: len(found)], strict=True):
        place.copy_(gradient)
    for total, gradient in zip(sums, gradients[len(found) :], strict=True):
        total.add_(gradient)
