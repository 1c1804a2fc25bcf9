"""The layer that tower and language model share: Megatron's TransformerLayer of its torch parts, with our attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rollplex.backends.megatron.rotary import turning
from rollplex.backends.megatron.swiglu import SwiGLU

_Layer: Any = TransformerLayerSubmodules  # Megatron's annotations are narrower than what it takes
_Heads: Any = SelfAttentionSubmodules


def layer_spec(
    attention: type, core: type, proj: type, fc1: type, fc2: type, norm: Any = WrappedTorchNorm
) -> ModuleSpec:
    """A layer of these modules; QKV is always one column-parallel linear."""
    heads = _Heads(linear_qkv=ColumnParallelLinear, core_attention=core, linear_proj=proj)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=_Layer(
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
    seen, angles = turning(masks, rotary)
    for layer, mask in zip(layers, seen, strict=True):
        call = partial(layer, attention_mask=mask, rotary_pos_emb=angles)
        if recompute:
            hidden, _ = checkpoint(call, hidden, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden, _ = call(hidden)
    return hidden
