"""Layers that read weights in the trainer's row order, between vLLM's own (paper section 3.3, design `reindex`).

qkv        y = [q0 q1 k0 v0 | q2 q3 k1 v1]     one gather of what the product gives: [q0 q1 q2 q3 | k0 k1 | v0 v1]
gate/up    y = [g0 u0 | g1 u1]                 the activation reads each pair by itself; its result is in natural order
tower      gate and up are two weights, as the checkpoint has them: one product each

Each takes the place of the vLLM module that it wraps; what is around it does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rollplex.backends.facts import Block
from rollplex.backends.shard import order_of


class ReorderedQkv(nn.Module):
    """A QKV projection whose weight has the rows `have`; gives the columns in the order `want`."""

    order: Tensor

    def __init__(self, projection: Any, have: Sequence[Block], want: Sequence[Block], device: torch.device) -> None:
        super().__init__()
        self.projection = projection
        self.register_buffer("order", order_of(tuple(have), tuple(want)).to(device), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """[tokens, rows], and the bias that vLLM may leave to its caller."""
        y, bias = self.projection(x)
        return y.index_select(-1, self.order), bias


class PairedActivation(nn.Module):
    """SiLU(gate) * up of `pairs` neighbouring pairs [g_j; u_j]: no copy, as the kernel reads the last dim."""

    def __init__(self, activation: Any, pairs: int) -> None:
        super().__init__()
        self.activation, self.pairs = activation, pairs

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, 2F] in pairs to [tokens, F]."""
        return self.activation(x.view(-1, x.shape[-1] // self.pairs)).view(*x.shape[:-1], -1)


class GateAndUp(nn.Module):
    """The tower's gate and up as two weights, in place of a fused projection."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        rows, columns = fused.weight.shape
        made = (nn.Linear(columns, rows // 2, fused.bias is not None, "meta", fused.weight.dtype) for _ in range(2))
        self.gate_proj, self.up_proj = made

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[.., 2F] as [gate; up]."""
        both = [linear(x, m.weight, m.bias) for m in (self.gate_proj, self.up_proj)]
        return torch.cat(both, dim=-1), None


def pairs_of(rows: Sequence[Block]) -> int:
    """How many pairs of gate and up there are in the rows of a fused weight; AssertionError where they do not pair."""
    parts, sizes = [b.part for b in rows], {b.stop - b.start for b in rows}
    assert parts == ["gate", "up"] * (len(rows) // 2), f"gate and up do not alternate: {parts}"
    assert len(sizes) == 1, f"blocks of {sorted(sizes)} rows"
    return len(rows) // 2
