"""Attention inside the windows of the vision tower: windows of one length go through the kernel together.

    hidden [1, heads, patches, d]   |w0|w1|w2|w3 |w4 |      ->   [3, heads, 4, d]  and  [2, heads, 6, d]

Transformers calls the kernel once for every window and frame; a video has hundreds of them, and the calls take longer
than the work. The name has `flash` in it because that is how transformers decides to hand the boundaries over.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from rollplex.backends.cuda import attention as gpu

NAME = "rollplex_flash_windows"


def install_windows(vision_config: PretrainedConfig) -> None:
    """Make a vision tower call `window_attention`."""
    AttentionInterface.register(NAME, window_attention)
    vision_config._attn_implementation = NAME


def window_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    cu_seq_lens_q: Tensor,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers looks up by name: [1, heads, patches, d] -> [1, patches, heads, d]."""
    bounds = cu_seq_lens_q.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if query.is_cuda:
        # The gradient of x[0] would be copied into zeros; that of what is squeezed is a view.
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return gpu.packed(q, k, v, gpu.Lengths.of(lengths, query.device), scaling, causal=False)[None], None
    if len(set(lengths)) == 1:
        return _together(query, key, value, lengths[0], scaling).transpose(0, 1)[None], None
    parts = []
    for length, index in _by_length(bounds, lengths):
        q, k, v = (t[:, :, index] for t in (query, key, value))
        parts.append((index, _together(q, k, v, length, scaling)))
    order = torch.cat([index for index, _ in parts])
    out = torch.cat([part for _, part in parts], dim=1)
    return out[:, torch.argsort(order)].transpose(0, 1)[None], None


def _together(query: Tensor, key: Tensor, value: Tensor, length: int, scaling: float) -> Tensor:
    """Consecutive windows of one length, [1, heads, windows * length, d] -> [heads, windows * length, d]."""
    q, k, v = (t[0].unflatten(1, (-1, length)).transpose(0, 1) for t in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, scale=scaling)
    return out.transpose(0, 1).flatten(1, 2)


def _by_length(bounds: list[int], lengths: list[int]) -> Iterator[tuple[int, Tensor]]:
    """Every distinct length with the positions of its windows, in order."""
    for length in sorted(set(lengths)):
        starts = torch.tensor([start for start, n in zip(bounds, lengths, strict=False) if n == length])
        yield length, (starts[:, None] + torch.arange(length)).flatten()
