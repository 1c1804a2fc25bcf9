"""Collectives leave a partition of a GPU and go back into it; what a green context is told is seen without a GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from processes import ranks
from torch import Tensor

from rollplex.backends.cuda.partition import Outside


class Context:
    """Stands for a green context: the block is inside when it begins."""

    def __init__(self) -> None:
        self.inside = True
        self.told: list[str] = []

    def set_context(self) -> None:
        assert not self.inside
        self.inside = True
        self.told.append("set")

    def pop_context(self) -> None:
        assert self.inside
        self.inside = False
        self.told.append("pop")


class Summed(torch.autograd.Function):
    """A collective in a forward of autograd's, as in a linear that is cut over ranks."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


def under(context: Context) -> list[tuple[list[str], list[float]]]:
    """What each operation of a block has told the context, and what it has computed."""
    found: list[tuple[list[str], list[float]]] = []
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((2,), 1.0 + rank, requires_grad=True)

    def note(value: Tensor) -> None:
        found.append((context.told[:], value.detach().tolist()))
        context.told.clear()

    def gathered() -> Tensor:
        slabs = torch.full((size, 1), float(rank))
        dist.distributed_c10d._get_default_group()._allgather_base(slabs.view(-1), slabs[rank]).wait()
        return slabs.view(-1)

    def scattered() -> Tensor:
        own = torch.zeros(1)
        dist.reduce_scatter(own, [torch.full((1,), 1.0 + rank) for _ in range(size)])
        return own

    with Outside(context):
        for work in (lambda: x + 1, lambda: Summed.apply(x), gathered, scattered):
            note(work())
    assert context.inside
    return found


def by_rank() -> list[tuple[list[str], list[float]]]:
    return under(Context())


def test_a_collective_leaves_the_partition_and_nothing_else_does() -> None:
    once = ["pop", "set"]
    for rank, found in enumerate(ranks(2).run(by_rank)):
        assert found == [
            ([], [2.0 + rank] * 2),
            (once, [3.0, 3.0]),
            (once, [0.0, 1.0]),
            (once, [3.0]),
        ]


def failing() -> tuple[list[str], bool]:
    context = Context()
    try:
        with Outside(context):
            dist.distributed_c10d._get_default_group()._allgather_base(torch.zeros(5), torch.zeros(2)).wait()
    except (RuntimeError, ValueError):
        return context.told, context.inside
    raise AssertionError("two parts of two elements are not five")


def test_a_collective_that_fails_leaves_the_block_where_it_was() -> None:
    assert ranks(2).run(failing) == [(["pop", "set"], True)] * 2
