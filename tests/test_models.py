"""Model dimensions: the published totals, and every name and shape against transformers' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollplex.ir.errors import JobError
from rollplex.ir.models import ModelSpec, load_model, model_names, spec_from_config
from tools.published import MODELS

# name: (parameters, GiB in bf16, KV bytes a token at TP=1)
PUBLISHED = MODELS | {
    # Totals as the hub states them for each checkpoint (safetensors.total).
    "Qwen2.5-1.5B": (1_543_714_304, 2.88, 28_672),
    "Qwen2.5-3B": (3_085_938_688, 5.75, 36_864),
    "Qwen2.5-14B": (14_770_033_664, 27.51, 196_608),
    "Qwen2.5-32B": (32_763_876_352, 61.03, 262_144),
    "Qwen2.5-72B": (72_706_203_648, 135.43, 327_680),
    "Qwen2-7B": (7_615_616_512, 14.19, 57_344),
    "Qwen2-72B": (72_706_203_648, 135.43, 327_680),
    "QwQ-32B": (32_763_876_352, 61.03, 262_144),
    "Qwen2-VL-2B": (2_208_985_600, 4.11, 28_672),
    "Qwen2-VL-7B": (8_291_375_616, 15.44, 57_344),
    "Qwen2-VL-72B": (73_405_560_320, 136.73, 327_680),
    "Qwen3-4B": (4_022_468_096, 7.49, 147_456),
    "Qwen3-8B": (8_190_735_360, 15.26, 147_456),
    "Llama-3.2-1B": (1_235_814_400, 2.3, 32_768),
    "Llama-3.2-3B": (3_212_749_824, 5.98, 114_688),
}


def test_the_registry_holds_the_published_models() -> None:
    assert set(model_names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones(name: str) -> None:
    parameters, gib, kv = PUBLISHED[name]
    spec = load_model(name)
    assert spec.parameters == parameters
    assert round(spec.parameters * 2 / 2**30, 2) == gib
    assert spec.kv_bytes_per_token() == kv


# ---- an independent check: the classes of transformers, built without memory

TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 131,
}
TOWER_2_5 = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}
TOWER_2 = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 3}
TOWER_3 = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
}
MOE = {**TEXT, "head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
SMALL: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": {"vision_config": TOWER_2_5, "text_config": TEXT},
    "Qwen2VL": {"vision_config": TOWER_2, "text_config": TEXT},
    "Qwen3VL": {"vision_config": TOWER_3, "text_config": {**TEXT, "head_dim": 24}},
    "Qwen3VLMoe": {"vision_config": TOWER_3, "text_config": {**MOE, "mlp_only_layers": [1]}},
    "Qwen2": TEXT,
    "Qwen3": {**TEXT, "head_dim": 24},
    "Llama": TEXT,
}


def meta_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the class that transformers builds for a config, in its order."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    root = type(config).__name__.removesuffix("Config")
    model_class = getattr(transformers, root + "ForConditionalGeneration", None) or getattr(
        transformers, root + "ForCausalLM"
    )
    with torch.device("meta"):
        model = model_class(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def our_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {t.name: t.shape for t in spec.tensors()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", SMALL)
def test_names_shapes_and_order_are_those_of_transformers(family: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, family + "Config")(**SMALL[family], tie_word_embeddings=tied)
    spec = spec_from_config(config.to_dict(), family)  # transformers 5 writes text_config and rope_parameters
    assert list(our_shapes(spec).items()) == list(meta_shapes(config).items())
    assert len({t.name for t in spec.tensors()}) == len(spec.tensors())


FLAT = ["Qwen2.5-VL-3B", "Qwen2.5-VL-7B", "Qwen2.5-VL-32B", "Qwen2-VL-2B", "Qwen2-VL-7B", "Qwen2-VL-72B"]
FLAT += ["Qwen2.5-1.5B", "QwQ-32B", "Qwen2-72B", "Qwen3-4B", "Qwen3-8B", "Llama-3.2-1B", "Llama-3.2-3B"]


@pytest.mark.parametrize("name", FLAT)
def test_published_flat_configs_mean_the_same_to_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    spec = load_model(name)
    assert "text_config" not in spec.config  # as published for transformers 4
    architecture = spec.config["architectures"][0].removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM")
    config_class = getattr(transformers, architecture + "Config")
    config = config_class(**{k: v for k, v in spec.config.items() if k not in ("model_type", "architectures")})
    assert list(our_shapes(spec).items()) == list(meta_shapes(config).items())


# ---- shards


def test_ranks_of_the_32b_model_hold_table_1s_bytes() -> None:
    spec = load_model("Qwen2.5-VL-32B")
    assert spec.language_parameters == 32_763_876_352
    assert spec.vision_parameters == 688_841_984
    for tp, gib in ((8, 7.63), (4, 15.26)):
        assert round(spec.rank_parameters(tp, "language") * 2 / 2**30, 2) == gib
    assert spec.rank_parameters(8, "vision") == spec.vision_parameters  # replicated


def test_a_cut_tensor_is_its_shards_side_by_side() -> None:
    spec = load_model("Qwen2.5-VL-7B")
    for tensor in spec.tensors():
        ways = 4 if tensor.axis is not None else 1
        assert spec.shard_numel(tensor, 4) * ways == tensor.numel


def test_kv_heads_are_repeated_when_ranks_outnumber_them() -> None:
    spec = load_model("Qwen2.5-VL-3B")  # 2 KV heads of 128
    assert spec.kv_bytes_per_token(2) == spec.kv_bytes_per_token(1) // 2
    assert spec.kv_bytes_per_token(8) == spec.kv_bytes_per_token(2)
    key = next(t for t in spec.tensors() if t.kind == "k")
    assert spec.shard_shape(key, 8) == (128, 2048)


def test_kv_bytes_follow_the_dtype() -> None:
    spec = load_model("Qwen2.5-VL-3B")
    assert spec.kv_bytes_per_token(1, itemsize=8) == 4 * spec.kv_bytes_per_token(1, itemsize=2)


def test_experts_are_cut_along_their_width() -> None:
    spec = load_model("Qwen3-VL-30B-A3B")
    fused = next(t for t in spec.tensors() if t.kind == "expert_gate_up")
    assert fused.shape == (128, 1536, 2048)
    assert spec.shard_shape(fused, 4) == (128, 384, 2048)


def test_legal_degrees() -> None:
    spec = load_model("Qwen2.5-VL-7B")  # 28 heads, 4 KV heads
    assert spec.tp_by_heads() == (1, 2, 4, 7, 14, 28)
    assert spec.legal_tp() == (1, 2, 4)
    assert "28 attention heads" in spec.tp_obstacles(8)[0]


def test_the_vocabulary_is_padded_once_for_both_engines() -> None:
    spec = spec_from_config({"model_type": "llama", **TEXT}, "tiny")
    assert spec.padded_vocab(4) == 192
    embed = spec.tensors()[0]
    assert spec.shard_shape(embed, 4) == (48, 64)
    assert spec.parameters == sum(t.numel for t in spec.tensors())  # padding is no parameter
    with pytest.raises(JobError, match="192 padded vocabulary rows do not divide by tensor_parallel 5"):
        spec.padded_vocab(5)


def test_visual_tokens_follow_patches_and_merging() -> None:
    vision = load_model("Qwen2.5-VL-32B").vision
    assert vision is not None
    assert vision.max_visual_tokens(1, 28 * 28) == 1  # one frame is padded to a temporal patch
    assert vision.max_visual_tokens(16, 448 * 448) == 8 * 256


# ---- where a model comes from


def write(path: Path, config: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def test_a_directory_and_its_config_json_are_the_same_model(tmp_path: Path) -> None:
    file = write(tmp_path / "Tiny-0.5B" / "config.json", {"model_type": "qwen2", **TEXT})
    from_directory, from_file = load_model(str(file.parent)), load_model(str(file))
    assert from_directory == from_file
    assert from_directory.name == "Tiny-0.5B"


def test_registry_names_ignore_case() -> None:
    assert load_model("qwen2.5-vl-32b").name == "Qwen2.5-VL-32B"


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(JobError, match=r"no model `Qwen2.5-VL-23B`.*\n.*try: .*Qwen2.5-VL-32B"):
        load_model("Qwen2.5-VL-23B")


REFUSED = {
    "no model": ("{", "config.json:1: not JSON"),
    "a number beyond bounds": ("9" * 5000, "cannot read it: Exceeds the limit"),
    "a list": ([], "expected an object with the model's fields, found list"),
    "no type": ({}, "field `model_type` is missing"),
    "other family": ({"model_type": "gpt2"}, "model_type `gpt2` is not supported"),
    "type is a list": ({"model_type": ["qwen2"]}, "is not supported"),
    "no field": ({"model_type": "qwen2", **TEXT, "hidden_size": None}, "field `hidden_size` is missing"),
    "wrong field": ({"model_type": "qwen2", **TEXT, "vocab_size": "many"}, "field `vocab_size` is 'many'"),
    "huge": ({"model_type": "qwen2", **TEXT, "num_hidden_layers": 10**6}, "expected a whole number from 1 to 10000"),
    "kv heads": ({"model_type": "qwen2", **TEXT, "num_key_value_heads": 3}, "3, which does not divide the 4 attention"),
    "bias": (
        {"model_type": "llama", **TEXT, "attention_bias": True},
        "`attention_bias` is true, which is not supported",
    ),
    "quantised": ({"model_type": "llama", **TEXT, "quantization_config": {}}, "quantised weights are not supported"),
    "no tower": ({"model_type": "qwen2_vl", **TEXT}, "field `vision_config` is missing"),
    "no experts": (
        {"model_type": "qwen3_vl_moe", "text_config": TEXT, "vision_config": TOWER_3},
        "field `text_config.num_experts` is missing",
    ),
    "widths": (
        {"model_type": "qwen3_vl", "text_config": TEXT, "vision_config": {**TOWER_3, "out_hidden_size": 65}},
        "`vision_config.out_hidden_size` is 65, but the language model's hidden_size is 64",
    ),
    "section": ({"model_type": "qwen2_vl", **TEXT, "vision_config": 3}, "`vision_config` is 3; expected an object"),
    "blocks": (
        {"model_type": "qwen2_5_vl", **TEXT, "vision_config": {**TOWER_2_5, "fullatt_block_indexes": "all"}},
        "`vision_config.fullatt_block_indexes` is 'all'; expected a list of layer numbers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unusable_config_is_refused_with_its_file_and_field(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    file = write(tmp_path / "m" / "config.json", config)
    with pytest.raises(JobError) as refusal:
        load_model(str(file))
    assert message in str(refusal.value)
    assert str(file) in str(refusal.value)


def test_all_problems_of_a_config_are_told_at_once(tmp_path: Path) -> None:
    file = write(tmp_path / "config.json", {"model_type": "qwen2", "hidden_size": 64, "vocab_size": 0})
    with pytest.raises(JobError) as refusal:
        load_model(str(file))
    fields = ("vocab_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
    assert len(refusal.value.problems) == len(fields)
    assert all(field in str(refusal.value) for field in fields)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"has no config\.json"):
        load_model(str(tmp_path))
