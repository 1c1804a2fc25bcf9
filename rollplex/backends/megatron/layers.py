"""The layer that tower and language model share: Megatron's TransformerLayer of its torch parts, with our attention.

Megatron    a layer's forward asks for dropout, inference, offloading, cross attention, before and between its parts
here        the same parts one behind the other: over a short suffix it is Python that the GPU waits for
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollplex.backends.megatron.linears import Column, Output, plus
from rollplex.backends.megatron.rotary import Fused, Turning, turning
from rollplex.backends.megatron.swiglu import SwiGLU

_Layer: Any = TransformerLayer  # Megatron's annotations are narrower than what it takes
_LayerParts: Any = TransformerLayerSubmodules
_Attention: Any = SelfAttention
_AttentionParts: Any = SelfAttentionSubmodules


class Attention(_Attention):
    """Hidden states [s, b, h] -> the projection's output, and its bias."""

    def forward(self, hidden: Tensor, attention_mask: Any, rotary_pos_emb: Tensor | Turning | None = None) -> Output:
        mixed, _ = self.linear_qkv(hidden)
        query, key, value = self.fused.heads(mixed, rotary_pos_emb, self.config, self.pg_collection.cp)
        return self.linear_proj(self.core_attention(query, key, value, attention_mask))

    @property
    def fused(self) -> Fused:
        """The fused rows go KV head by KV head."""
        groups = self.num_query_groups_per_partition
        return Fused(groups, self.num_attention_heads_per_partition // groups, 1)


class Layer(_Layer):
    """Hidden states [s, b, h] -> [s, b, h]; what a part has read is let go before the next one begins."""

    __call__ = nn.Module.__call__  # Megatron's asks first whether it is to capture CUDA graphs

    def forward(self, hidden: Tensor, attention_mask: Any, rotary_pos_emb: Tensor | Turning | None = None) -> Tensor:
        hidden = hidden + plus(*self.self_attention(self.input_layernorm(hidden), attention_mask, rotary_pos_emb))
        mlp = self.mlp
        gated = mlp.activation_func(plus(*mlp.linear_fc1(self.pre_mlp_layernorm(hidden))))
        return hidden + plus(*mlp.linear_fc2(gated))


def layer_spec(
    attention: type, core: type, proj: type, fc1: type, fc2: type, norm: Any = WrappedTorchNorm
) -> ModuleSpec:
    """A layer of these modules; QKV is always one column-parallel linear."""
    heads = _AttentionParts(linear_qkv=Column, core_attention=core, linear_proj=proj)
    return ModuleSpec(
        module=Layer,
        submodules=_LayerParts(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=attention, params={"attn_mask_type": AttnMaskType.causal}, submodules=heads
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(fc1, SwiGLU, fc2)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def run_layers(layers: Iterable[Any], hidden: Tensor, masks: Sequence[Any], rotary: Tensor, recompute: bool) -> Tensor:
    """[s, b, h] through the layers, each with its mask; `recompute` keeps only their inputs for the backward.

    The checkpoint is the non-reentrant one: inside Megatron's own, keys and values would be cut off from the graph.
    """
    angles = turning(rotary)
    for layer, mask in zip(layers, masks, strict=True):
        call = partial(layer, attention_mask=mask, rotary_pos_emb=angles)
        hidden = checkpoint(call, hidden, use_reentrant=False, preserve_rng_state=False) if recompute else call(hidden)
    return hidden
