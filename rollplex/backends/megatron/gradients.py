"""Which gradients a rank counts in the norm of the whole model.

Shares are counted by their own rank; what every rank has (norms, row-parallel biases, the tower) is the same on all of
them to the bit, and counted by the first.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollplex.backends.megatron.names import Parameter


def counted(order: Iterable[Parameter], rank: int) -> tuple[Parameter, ...]:
    """The parameters whose squares this rank adds to the norm: over all ranks, every element of the model once."""
    return tuple(p for p in order if p.sharded or rank == 0)
