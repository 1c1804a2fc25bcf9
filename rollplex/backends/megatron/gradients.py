"""Gradients of a rank in one flat slab, and which of them it counts in the norm of the whole model.

A gradient is added to its place the moment autograd has finished it, and the parameter keeps none. Shares are counted
by their own rank; what every rank has (norms, row-parallel biases, the tower) is the same on all of them to the bit,
and counted by the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from rollplex.backends.megatron.names import Parameter
from rollplex.backends.training.gradients import adder


def accumulate(model: nn.Module, slabs: Mapping[str, Tensor]) -> None:
    """From now on add each parameter's final gradient to the slab of its name, in the slab's dtype."""
    for name, parameter in model.named_parameters():
        if name in slabs:
            parameter.register_post_accumulate_grad_hook(adder(slabs[name]))


def counted(order: Iterable[Parameter], rank: int) -> tuple[Parameter, ...]:
    """The parameters whose squares this rank adds to the norm: over all ranks, every element of the model once."""
    return tuple(p for p in order if p.sharded or rank == 0)
