"""A model's config.json as Megatron's settings: one TransformerConfig for the language model, the tower, its projector.

Fusions are off: they are CUDA kernels. Weights are never initialised: they are views of memory that is filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import gelu, silu

from rollplex.backends.hf.model import parse_config
from rollplex.ir.errors import JobError, Problem

_EPS_VISION = 1e-6  # transformers states it in code, not in the config


def parse(config: Mapping[str, Any]) -> Any:
    """The config of a model that this backend runs; JobError for what it cannot."""
    parsed = parse_config(config, "megatron")
    problems = list(_unable(parsed))
    if problems:
        raise JobError(*(Problem(f"the megatron backend has no {what}", hint=hint) for what, hint in problems))
    return parsed


def _unable(parsed: Any) -> list[tuple[str, str]]:
    text, vision = parsed.text_config, parsed.vision_config
    rope = text.rope_parameters["rope_type"]
    checks = (
        (text.use_sliding_window, "sliding window", "set use_sliding_window to false"),
        (text.attention_dropout, "attention dropout: a split call must be exact", "set attention_dropout to 0"),
        ({text.hidden_act, vision.hidden_act} != {"silu"}, "activation but silu", "set hidden_act to silu"),
        (rope != "default", f"rope_type {rope}", "set rope_type to default"),
    )
    return [(what, hint) for wrong, what, hint in checks if wrong]


def language_settings(parsed: Any, dtype: torch.dtype, tp: int, sequence_parallel: bool = False) -> TransformerConfig:
    """Settings of the decoder, cut over `tp` ranks, between its cut linears along the sequence if asked."""
    text = parsed.text_config
    return TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        ffn_hidden_size=text.intermediate_size,
        layernorm_epsilon=text.rms_norm_eps,
        add_bias_linear=False,
        add_qkv_bias=True,
        mrope_section=text.rope_parameters["mrope_section"],
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        gated_linear_unit=True,
        activation_func=silu,
        use_te_activation_func=True,  # swiglu.py: both halves at once
        **_common(dtype),
    )


def vision_settings(parsed: Any, dtype: torch.dtype) -> TransformerConfig:
    """Settings of the tower's blocks; every rank has all of them."""
    vision = parsed.vision_config
    return TransformerConfig(
        num_layers=vision.depth,
        hidden_size=vision.hidden_size,
        num_attention_heads=vision.num_heads,
        ffn_hidden_size=vision.intermediate_size,
        layernorm_epsilon=_EPS_VISION,
        add_bias_linear=True,
        gated_linear_unit=True,
        activation_func=silu,
        use_te_activation_func=True,  # swiglu.py: both halves at once
        **_common(dtype),
    )


def projector_settings(parsed: Any, dtype: torch.dtype) -> TransformerConfig:
    """Settings of the projector: two linears with an exact GELU between them."""
    vision = parsed.vision_config
    return TransformerConfig(
        num_layers=1,
        hidden_size=vision.out_hidden_size,
        num_attention_heads=vision.num_heads,
        ffn_hidden_size=vision.hidden_size * vision.spatial_merge_size**2,
        kv_channels=1,
        add_bias_linear=True,
        gated_linear_unit=False,
        activation_func=gelu,
        **_common(dtype),
    )


def _common(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "use_cpu_initialization": True,  # allocate without naming a device, so that `with device("meta")` holds
        "perform_initialization": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "cuda_graph_scope": [],  # the whole layer, if ever; its default is deprecated and warns
    }
