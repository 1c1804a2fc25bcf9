"""Transformers' attention of a language layer, handed to whoever the call brings along.

What happens in `host_attention` is decided by the `io` that travels down with the call: capture the keys and values
(prefix), read a prefix (suffix, rollout), or plain sdpa (no io).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rollplex.backends.training.attention import LayerIO

NAME = "rollplex_host"


def install_attention(text_config: PretrainedConfig) -> None:
    """Make a model's language layers call `host_attention`; plain calls of the model still run transformers' sdpa."""
    AttentionInterface.register(NAME, host_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    text_config._attn_implementation = NAME


def host_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    io: LayerIO | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers looks up by name; returns [n, s, heads, d]."""
    if io is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return io.attend(module.layer_idx, query, key, value, scaling).transpose(1, 2), None
