"""Megatron's core attention over a shared prefix: what a query may see travels down with the call.

mode       `attention_mask` of the layer call       keys of a query
off        None                                     its own sequence, causal
capture    boundary.Capture: copies K, V         its own sequence, causal
suffix     ReadPrefix                               the prefix, one copy for all responses, and its own response

Megatron hands `attention_mask` from a layer to its core attention untouched, also when a checkpoint runs the layer
again in a backward; a mode kept in the module would by then be another one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rollplex.backends.cuda import attention as gpu
from rollplex.backends.training.attention import causal, causal_after


class SharedPrefixAttention(nn.Module):
    """A `core_attention` of Megatron's spec: rotated heads [s, b, heads, d] -> [s, b, heads * d]."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any) -> Tensor:
        # A copy: what is saved of a view is all of the fused projection, queries and keys included.
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value.contiguous()))
        if attention_mask is None:
            out = causal(q, k, v, self.scale)
        else:
            out = attention_mask.attend(self.layer, q, k, v, self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


class ReadPrefix:
    """n responses end to end in one sequence of t tokens, each after the same prefix.

    A GPU takes them as they are. On a host, only here do they stand side by side, [n, heads, T, d], padded on the
    right, which causal attention makes exact.
    The boundary is unbound once: indexing it layer by layer would make a full-size gradient for each layer.
    """

    def __init__(self, kv: Tensor, lengths: Sequence[int]) -> None:
        self.layers = [layer.unbind(0) for layer in kv.unbind(0)]
        self.lengths = list(lengths)
        self.real = torch.arange(max(lengths)) < torch.tensor(self.lengths)[:, None]
        self.packed = gpu.Lengths.of(self.lengths, kv.device) if kv.is_cuda else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        prefix_key, prefix_value = self.layers[layer]
        if self.packed is not None:
            # The gradient of x[0] would be copied into zeros; that of what is squeezed is a view.
            q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
            out = gpu.packed_after_prefix(q, k, v, self.packed, prefix_key, prefix_value, scale)
            return out.transpose(0, 1)[None]
        query, key, value = (self._apart(x) for x in (query, key, value))
        out = causal_after(query, key, value, [(prefix_key, prefix_value)], scale)
        return out.transpose(1, 2)[self.real].transpose(0, 1)[None]

    def _apart(self, packed: Tensor) -> Tensor:
        """[1, heads, t, d] -> [n, heads, T, d]."""
        rows = packed[0].transpose(0, 1).split(self.lengths)
        return pad_sequence(list(rows), batch_first=True).transpose(1, 2)
