"""Linears of Megatron's layers, whose parameters lie as the plan stores them (paper section 3.3).

Column                  where a rank has nothing to send: torch's own linear, whose backward runs without Python
Row                     that, and the sum over the ranks behind it
TransposedRow           the parameter itself is [I / tp, O]: one slab of a rollout shard cut along I       case 2
SplitGateUp             gate and up are two parameters, not one [gate; up]: they may lie in two slabs       case 1

Rows whose bytes are no multiple of 16 a GPU multiplies otherwise (aligned.py). Each gives its output and the bias that
is still to be added, or None, as Megatron's do.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from torch import Tensor, nn
from torch.nn import functional as F

from rollplex.backends.megatron.aligned import joined, odd, odd_width, padded

Output = tuple[Tensor, Tensor | None]
_Column: Any = ColumnParallelLinear  # Megatron's annotations are wider than what layers hand over
_Row: Any = RowParallelLinear


def plus(out: Tensor, bias: Tensor | None) -> Tensor:
    """A linear's output with the bias that it left."""
    return out if bias is None else out + bias


class Column(_Column):
    """Megatron's ColumnParallelLinear; with other ranks it sends what the backward sums while it multiplies."""

    def forward(self, hidden: Tensor, weight: Any = None, **_: Any) -> Output:
        alone = self.tp_group.size() == 1
        if not alone and (self.sequence_parallel or torch.is_grad_enabled()):
            return super().forward(hidden, weight)
        weight = self.weight if weight is None else weight
        if self.skip_bias_add:
            return F.linear(hidden, weight), self.bias
        if alone:
            return F.linear(hidden, weight, self.bias), None
        return plus(F.linear(hidden, weight), self.bias), None  # rounded as Megatron's, which has a backward


class Row(_Row):
    """Megatron's RowParallelLinear: [.., I / tp] of each rank -> [.., O] of all."""

    def forward(self, hidden: Tensor) -> Output:
        out = self.product(hidden)
        if self.sequence_parallel:
            out = reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        elif self.tp_group.size() > 1:
            out = reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        return out, self.bias

    def product(self, hidden: Tensor) -> Tensor:
        """This rank's part of the sum."""
        return (padded if odd(hidden) else F.linear)(hidden, self.weight)


class TransposedRow(Row):
    """`Row` over a weight stored [I / tp, O]; its gradient comes in that shape too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = nn.Parameter(self.weight.detach().new_empty(self.weight.shape[::-1]))

    def product(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight


class SplitGateUp(nn.Module):
    """A `linear_fc1` of two parameters: [.., H] -> [.., 2 f] = [gate | up] of this rank; biases are added here."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, bias: bool, tp_group: Any, **_: Any) -> None:
        super().__init__()
        rows = output_size // 2 // tp_group.size()
        self.tp_group, self.sequence_parallel = tp_group, config.sequence_parallel
        self.gate = nn.Linear(input_size, rows, bias=bias, dtype=config.params_dtype)
        self.up = nn.Linear(input_size, rows, bias=bias, dtype=config.params_dtype)

    def forward(self, hidden: Tensor) -> Output:
        if self.sequence_parallel:
            return torch.cat([self._of_stretches(hidden, part) for part in (self.gate, self.up)], dim=-1), None
        if self.tp_group.size() > 1:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        if odd_width(hidden, self.gate.out_features):
            return joined(hidden, self.gate, self.up), None
        return torch.cat([self.gate(hidden), self.up(hidden)], dim=-1), None

    def _of_stretches(self, hidden: Tensor, part: nn.Linear) -> Tensor:
        """Gathers the tokens, and keeps the rank's stretch alone for the backward."""
        return linear_with_grad_accumulation_and_async_allreduce(
            hidden, part.weight, part.bias, gradient_accumulation_fusion=False, allreduce_dgrad=False,
            sequence_parallel=True, tp_group=self.tp_group,
        )  # fmt: skip
