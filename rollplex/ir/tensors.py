"""The parameters of each supported family, in the order and under the names of transformers' `named_parameters()`.

model.visual.blocks.0.attn.qkv.weight                (3840, 1280)  vision    replicated
model.language_model.layers.0.self_attn.q_proj.weight (5120, 5120) language  cut along 0
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from rollplex.ir.spec import ModelSpec, Tensor, VisionSpec


@lru_cache(maxsize=64)
def model_tensors(spec: ModelSpec) -> tuple[Tensor, ...]:
    """All parameters of a model, a tied embedding once."""
    return (*_vision(spec), *_language(spec))


# ---- language model


def _language(spec: ModelSpec) -> Iterator[Tensor]:
    root = "model.language_model." if spec.vision else "model."
    yield Tensor(root + "embed_tokens.weight", (spec.vocab, spec.hidden), "language", "embed", axis=0)
    for layer in range(spec.layers):
        yield from _attention(spec, f"{root}layers.{layer}.self_attn.", layer)
        yield from _feed_forward(spec, f"{root}layers.{layer}.mlp.", layer)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Tensor(f"{root}layers.{layer}.{norm}.weight", (spec.hidden,), "language", "norm", layer)
    yield Tensor(root + "norm.weight", (spec.hidden,), "language", "norm")
    if spec.head == "scalar":
        yield Tensor("score.weight", (1, spec.hidden), "language", "score")
    elif not spec.tied:
        yield Tensor("lm_head.weight", (spec.vocab, spec.hidden), "language", "head", axis=0)


def _attention(spec: ModelSpec, prefix: str, layer: int) -> Iterator[Tensor]:
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    for kind, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        yield Tensor(f"{prefix}{kind}_proj.weight", (rows, spec.hidden), "language", kind, layer, 0)
        if spec.qkv_bias:
            yield Tensor(f"{prefix}{kind}_proj.bias", (rows,), "language", f"{kind}_bias", layer, 0)
    yield Tensor(f"{prefix}o_proj.weight", (spec.hidden, q_rows), "language", "o", layer, 1)
    if spec.qk_norm:
        for kind in ("q_norm", "k_norm"):
            yield Tensor(f"{prefix}{kind}.weight", (spec.head_dim,), "language", kind, layer)


def _feed_forward(spec: ModelSpec, prefix: str, layer: int) -> Iterator[Tensor]:
    moe = spec.moe
    if moe is None or layer in moe.dense_layers:
        for kind in ("gate", "up"):
            yield Tensor(f"{prefix}{kind}_proj.weight", (spec.ffn, spec.hidden), "language", kind, layer, 0)
        yield Tensor(f"{prefix}down_proj.weight", (spec.hidden, spec.ffn), "language", "down", layer, 1)
        return
    fused, down = (moe.experts, 2 * moe.ffn, spec.hidden), (moe.experts, spec.hidden, moe.ffn)
    yield Tensor(f"{prefix}experts.gate_up_proj", fused, "language", "expert_gate_up", layer, 1)
    yield Tensor(f"{prefix}experts.down_proj", down, "language", "expert_down", layer, 2)
    yield Tensor(f"{prefix}gate.weight", (moe.experts, spec.hidden), "language", "router", layer)


# ---- vision towers: one table of (name, shape) a family

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _vision(spec: ModelSpec) -> Iterator[Tensor]:
    if spec.vision is None:
        return
    shapes = {"qwen2_5_vl": _tower_2_5, "qwen2_vl": _tower_2}.get(spec.family, _tower_3)(spec.vision)
    for name, shape in shapes:
        block = int(name.split(".")[1]) if name.startswith("blocks.") else None
        yield Tensor("model.visual." + name, shape, "vision", "vision", block)


def _linear(name: str, rows: int, columns: int) -> Shapes:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _layer_norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _patch_embed(vision: VisionSpec) -> tuple[str, tuple[int, ...]]:
    kernel = (vision.temporal_patch, vision.patch, vision.patch)
    return "patch_embed.proj.weight", (vision.hidden, vision.channels, *kernel)


def _block_attention(vision: VisionSpec, prefix: str) -> Shapes:
    yield from _linear(prefix + "attn.qkv", 3 * vision.hidden, vision.hidden)
    yield from _linear(prefix + "attn.proj", vision.hidden, vision.hidden)


def _merger_mlp(vision: VisionSpec, first: str, second: str) -> Shapes:
    width = vision.hidden * vision.merge**2
    yield from _linear(first, width, width)
    yield from _linear(second, vision.out_hidden, width)


def _tower_2_5(vision: VisionSpec) -> Shapes:
    """Qwen2.5-VL: RMS norms, a gated MLP with biases."""
    yield _patch_embed(vision)
    for block in range(vision.depth):
        prefix = f"blocks.{block}."
        yield prefix + "norm1.weight", (vision.hidden,)
        yield prefix + "norm2.weight", (vision.hidden,)
        yield from _block_attention(vision, prefix)
        yield from _linear(prefix + "mlp.gate_proj", vision.ffn, vision.hidden)
        yield from _linear(prefix + "mlp.up_proj", vision.ffn, vision.hidden)
        yield from _linear(prefix + "mlp.down_proj", vision.hidden, vision.ffn)
    yield "merger.ln_q.weight", (vision.hidden,)
    yield from _merger_mlp(vision, "merger.mlp.0", "merger.mlp.2")


def _layer_norm_blocks(vision: VisionSpec, first: str, second: str) -> Shapes:
    for block in range(vision.depth):
        prefix = f"blocks.{block}."
        yield from _layer_norm(prefix + "norm1", vision.hidden)
        yield from _layer_norm(prefix + "norm2", vision.hidden)
        yield from _block_attention(vision, prefix)
        yield from _linear(prefix + first, vision.ffn, vision.hidden)
        yield from _linear(prefix + second, vision.hidden, vision.ffn)


def _tower_2(vision: VisionSpec) -> Shapes:
    """Qwen2-VL: layer norms, a plain MLP."""
    yield _patch_embed(vision)
    yield from _layer_norm_blocks(vision, "mlp.fc1", "mlp.fc2")
    yield from _layer_norm("merger.ln_q", vision.hidden)
    yield from _merger_mlp(vision, "merger.mlp.0", "merger.mlp.2")


def _tower_3(vision: VisionSpec) -> Shapes:
    """Qwen3-VL: learned positions, and a merger for each block whose features go deep into the language model."""
    assert vision.positions is not None
    yield _patch_embed(vision)
    yield "patch_embed.proj.bias", (vision.hidden,)
    yield "pos_embed.weight", (vision.positions, vision.hidden)
    yield from _layer_norm_blocks(vision, "mlp.linear_fc1", "mlp.linear_fc2")
    yield from _layer_norm("merger.norm", vision.hidden)
    yield from _merger_mlp(vision, "merger.linear_fc1", "merger.linear_fc2")
    for index in range(len(vision.deepstack)):
        prefix = f"deepstack_merger_list.{index}."
        yield from _layer_norm(prefix + "norm", vision.hidden * vision.merge**2)
        yield from _merger_mlp(vision, prefix + "linear_fc1", prefix + "linear_fc2")
