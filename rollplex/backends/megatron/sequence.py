"""Sequence parallelism: between the cut linears each rank has a stretch of the tokens, in front of them all of them.

embed      all tokens on every rank  ->  rank r keeps stretch r, behind it padding up to a multiple of the ranks
norms      on the stretch: what a rank adds to a norm's gradient is a part of it, and the parts are summed
linears    Megatron's own: gathered in front, summed and scattered behind, gathered again in the backward
attention  all tokens of the rank's heads, without the padding
head       gathered once

Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn.functional import pad

from rollplex.backends.megatron.groups import Group
from rollplex.backends.training.attention import LayerIO


class StretchNorm(nn.RMSNorm):
    """An RMSNorm of a stretch of the tokens; its weight's gradient is that of all of them."""

    def __init__(self, config: Any, hidden_size: int, eps: float, group: Group, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.group)
        return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)


def norm(group: Group) -> ModuleSpec:
    """The norm of a layer whose ranks have stretches."""
    return ModuleSpec(module=StretchNorm, params={"group": group})


def start() -> None:
    """Make the room that Megatron gathers into, once a process."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def padding(tokens: int, group: Group) -> int:
    """Tokens that make a sequence a multiple of the ranks."""
    return -tokens % group.size()


def scattered(hidden: Tensor, group: Group) -> Tensor:
    """The rank's stretch [s / tp, 1, h] of hidden states [tokens, 1, h] that every rank has; zeros are the padding."""
    more = padding(len(hidden), group)
    return scatter_to_sequence_parallel_region(pad(hidden, (0, 0, 0, 0, 0, more)), group=group)


def gathered(hidden: Tensor, tokens: int, group: Group) -> Tensor:
    """All tokens again. Each rank's gradient of them is whole: the head sums it over the ranks."""
    return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)[:tokens]


class Unpadded:
    """Attention without the padding behind the tokens: it has no keys, and what it gives is zero."""

    def __init__(self, io: LayerIO, tokens: int) -> None:
        self.io, self.tokens = io, tokens

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        more = query.shape[2] - self.tokens
        q, k, v = (x[:, :, : self.tokens] for x in (query, key, value))
        return pad(self.io.attend(layer, q, k, v, scale), (0, 0, 0, more))


def stretched(positions: Tensor, group: Group) -> Tensor:
    """Positions [3, tokens] with some for the padding."""
    more = padding(positions.shape[1], group)
    return torch.cat([positions, positions[:, -1:].expand(-1, more)], dim=1)
