"""From a layer's fused projection to the heads that attention takes: rotary embeddings, Megatron's own or a kernel's.

a host     [groups of q | k | v]  ->  q, k, v  ->  rotated(q), rotated(k), v          angles [s, 1, 1, d]
a GPU      [groups of q | k | v]  ->  rotated q, rotated k, v                         Turning(cos, sin), for all layers
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from torch import Tensor

Heads = tuple[Tensor, Tensor, Tensor]


class Turning(NamedTuple):
    """The angles that heads stand at: cosines and sines [s, d / 2], float32, on a GPU."""

    cos: Tensor
    sin: Tensor


class Fused(NamedTuple):
    """How heads lie in the rows of a fused projection: groups, heads of queries in each, and of keys as of values."""

    groups: int
    queries: int
    keys: int

    def heads(self, mixed: Tensor, angles: Tensor | Turning | None, config: Any, cp_group: Any) -> Heads:
        """[s, b, width] -> queries, keys and values [s, b, heads, d], queries and keys rotated."""
        if isinstance(angles, Turning):
            from rollplex.backends.cuda.heads import heads  # Triton is there where a GPU is

            return heads(mixed, *angles, self)
        every = self.queries + 2 * self.keys
        parts = mixed.unflatten(-1, (self.groups, every, -1)).split((self.queries, self.keys, self.keys), dim=3)
        query, key, value = (x.flatten(2, 3) for x in parts)
        if angles is None:
            return query, key, value
        query, key = (apply_rotary_pos_emb(x, angles, config, cp_group=cp_group) for x in (query, key))
        return query, key, value


def turning(rotary: Tensor) -> Tensor | Turning:
    """Rotary angles [s, 1, 1, d], both halves alike, as the layers are to take them."""
    if not rotary.is_cuda:
        return rotary
    half = rotary[:, 0, 0, : rotary.shape[-1] // 2].float()
    return Turning(half.cos(), half.sin())
