"""Rotary embeddings of a layer: Megatron's own, or on a GPU one kernel's, as the core attention takes its heads.

Megatron    q, k = rotated(q, k)    core_attention(q, k, v, mask)
a GPU       core_attention(q, k, v, Turning(mask, cos, sin))        cosines and sines once for all layers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Turning:
    """What a layer's heads may see, and the angles that they stand at: cosines and sines [s, d / 2], float32."""

    mask: Any
    cos: Tensor
    sin: Tensor

    def turn(self, heads: Tensor) -> Tensor:
        """[s, 1, heads, d]."""
        from rollplex.backends.cuda.fused import rotate  # Triton is there where a GPU is

        return rotate(heads[:, 0], self.cos, self.sin)[:, None]


def turning(masks: Sequence[Any], rotary: Tensor) -> tuple[list[Any], Tensor | None]:
    """Masks of layers and rotary angles [s, 1, 1, d], both halves alike, as `TransformerLayer` is to take them."""
    if not rotary.is_cuda:
        return list(masks), rotary
    half = rotary[:, 0, 0, : rotary.shape[-1] // 2].float()
    cos, sin = half.cos(), half.sin()
    return [Turning(mask, cos, sin) for mask in masks], None


def turned(query: Tensor, key: Tensor, mask: Any) -> tuple[Tensor, Tensor, Any]:
    """A core attention's heads as it is to take them, and what they may see."""
    if not isinstance(mask, Turning):
        return query, key, mask
    return mask.turn(query), mask.turn(key), mask.mask
