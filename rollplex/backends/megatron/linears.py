"""Linears whose parameters lie as the plan stores them (paper section 3.3).

TransposedRowParallel   the parameter itself is [I / tp, O]: one slab of a rollout shard cut along I       case 2
SplitGateUp             gate and up are two parameters, not one [gate; up]: they may lie in two slabs       case 1
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from torch import Tensor, nn


class TransposedRowParallel(RowParallelLinear):
    """Megatron's RowParallelLinear over a weight stored [I / tp, O]; its gradient comes in that shape too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = nn.Parameter(self.weight.detach().new_empty(self.weight.shape[::-1]))

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super()._forward_impl(input, weight.t(), *args, **kwargs)


class SplitGateUp(nn.Module):
    """A `linear_fc1` of two parameters: [.., H] -> [.., 2 f] = [gate | up] of this rank; biases are added here."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, bias: bool, tp_group: Any, **_: Any) -> None:
        super().__init__()
        rows = output_size // 2 // tp_group.size()
        self.tp_group, self.sequence_parallel = tp_group, config.sequence_parallel
        self.gate = nn.Linear(input_size, rows, bias=bias, dtype=config.params_dtype)
        self.up = nn.Linear(input_size, rows, bias=bias, dtype=config.params_dtype)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            return torch.cat([self._of_stretches(hidden, part) for part in (self.gate, self.up)], dim=-1), None
        hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        return torch.cat([self.gate(hidden), self.up(hidden)], dim=-1), None

    def _of_stretches(self, hidden: Tensor, part: nn.Linear) -> Tensor:
        """Gathers the tokens, and keeps the rank's stretch alone for the backward."""
        return linear_with_grad_accumulation_and_async_allreduce(
            hidden, part.weight, part.bias, gradient_accumulation_fusion=False, allreduce_dgrad=False,
            sequence_parallel=True, tp_group=self.tp_group,
        )  # fmt: skip
