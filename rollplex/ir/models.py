"""Find a model by name, directory or config.json, and read its dimensions.

load_model("qwen2.5-vl-32b").parameters == 33_452_718_336
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from rollplex.ir.errors import JobError, Problem
from rollplex.ir.spec import Family, ModelSpec, MoeSpec, Part, Tensor, VisionSpec
from rollplex.ir.textfile import read_text

__all__ = ["ModelSpec", "MoeSpec", "Part", "Tensor", "VisionSpec", "load_model", "model_names", "spec_from_config"]

FAMILIES: tuple[str, ...] = get_args(Family)
_VISION_FAMILIES = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
_MOST = 10_000  # layers or heads: beyond it a config is a slip, and enumerating its tensors would take for ever
_REGISTRY = resources.files("rollplex.ir") / "registry"


@lru_cache(maxsize=1)
def model_names() -> tuple[str, ...]:
    """Names in the built-in registry."""
    return tuple(sorted(p.name.removesuffix(".json") for p in _REGISTRY.iterdir() if p.name.endswith(".json")))


def registry_name(name: str) -> str | None:
    """The registry's spelling of a name in any case; None when it is not there."""
    return {known.lower(): known for known in model_names()}.get(name.lower())


def load_model(name_or_path: str) -> ModelSpec:
    """The model of this registry name (any case), Hugging Face directory, or config.json file."""
    if name := registry_name(name_or_path):
        return _from_registry(name)
    path = Path(os.path.expanduser(name_or_path))
    if os.path.exists(path):
        return spec_from_config(read_config(path), model_label(path), config_file(path))
    raise JobError(f"no model `{name_or_path}`: neither in the registry nor a path", hint=_near(name_or_path))


@lru_cache(maxsize=64)
def _from_registry(name: str) -> ModelSpec:
    return spec_from_config(json.loads((_REGISTRY / f"{name}.json").read_text("utf-8")), name)


def model_label(path: Path) -> str:
    """What to call the model at a path: its directory's name."""
    return path.parent.name if path.suffix == ".json" else path.name


def _near(name: str) -> str:
    lowered = {known.lower(): known for known in model_names()}
    close = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)
    if close:
        return " or ".join(lowered[c] for c in close)
    return "a Hugging Face directory, a config.json, or one of " + ", ".join(model_names())


def config_file(path: Path) -> Path:
    """The config.json that a model path means."""
    return path / "config.json" if path.is_dir() else path


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a config.json, or of the one inside a Hugging Face directory."""
    file = config_file(path)
    try:
        config = json.loads(read_text(file))
    except FileNotFoundError:
        raise JobError(f"{path} has no config.json", hint="give a Hugging Face model directory") from None
    except json.JSONDecodeError as error:
        raise JobError(f"not JSON: {error.msg}", where=f"{file}:{error.lineno}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise JobError(f"cannot read it: {error}", where=file) from None
    if not isinstance(config, dict):
        raise JobError(f"expected an object with the model's fields, found {type(config).__name__}", where=file)
    return config


class _Fields:
    """Reads fields out of (a section of) a config and collects what is wrong, so that all of it is told at once."""

    def __init__(self, config: Mapping[str, Any], problems: list[Problem], where: str, section: str = "") -> None:
        self.config, self.problems, self.where, self.section = config, problems, where, section

    def wrong(self, key: str, what: str) -> None:
        self.problems.append(Problem(f"field `{self.section}{key}` {what}", self.where))

    def count(self, *keys: str, default: int | None = None, most: int = 10**9) -> int:
        """A whole number under the first of these keys that is there; 1 stands in for a wrong one."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                self.wrong(key, f"is {value!r}; expected a whole number from 1 to {most}")
                return 1
            return value
        if default is None:
            self.wrong(keys[0], "is missing")
            return 1
        return default

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(key, f"is {value!r}; expected true or false")
        return bool(value)

    def indices(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(i, int) and i >= 0 for i in value):
            self.wrong(key, f"is {value!r}; expected a list of layer numbers")
            return ()
        return tuple(value)

    def unsupported(self, key: str) -> None:
        if self.flag(key):
            self.wrong(key, "is true, which is not supported")

    def child(self, key: str) -> _Fields:
        value = self.config.get(key)
        if value is not None and not isinstance(value, dict):
            self.wrong(key, f"is {value!r}; expected an object")
            value = None
        return _Fields(value or {}, self.problems, self.where, f"{self.section}{key}.")


def spec_from_config(config: Mapping[str, Any], name: str, where: object = "") -> ModelSpec:
    """The dimensions stated by config.json fields, flat (transformers 4) or with a text_config (transformers 5)."""
    family = config.get("model_type")
    where = str(where or name)
    if family not in FAMILIES:
        what = f"model_type `{family}` is not supported" if family else "field `model_type` is missing"
        raise JobError(what, where=where, hint="supported families: " + ", ".join(FAMILIES))
    problems: list[Problem] = []
    spec = _spec(_Fields(config, problems, where), family, name)
    if problems:
        raise JobError(*problems)
    return spec


def _spec(top: _Fields, family: Family, name: str) -> ModelSpec:
    text = top.child("text_config") if "text_config" in top.config else top
    hidden, heads = text.count("hidden_size"), text.count("num_attention_heads", most=_MOST)
    kv_heads = text.count("num_key_value_heads", default=heads)
    head_dim = text.count("head_dim", default=hidden // heads or 1)
    if heads % kv_heads:
        text.wrong("num_key_value_heads", f"is {kv_heads}, which does not divide the {heads} attention heads")
    text.unsupported("attention_bias")
    text.unsupported("mlp_bias")
    if top.config.get("quantization_config") is not None:
        top.wrong("quantization_config", "is there; quantised weights are not supported")
    layers = text.count("num_hidden_layers", most=_MOST)
    return ModelSpec(
        name=name,
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=text.count("intermediate_size"),
        vocab=text.count("vocab_size"),
        tied=top.flag("tie_word_embeddings", default=text.flag("tie_word_embeddings")),
        qkv_bias=family in ("qwen2_5_vl", "qwen2_vl", "qwen2"),
        qk_norm=family in ("qwen3", "qwen3_vl", "qwen3_vl_moe"),
        vision=_vision(top, family, hidden) if family in _VISION_FAMILIES else None,
        moe=_moe(text, layers) if family == "qwen3_vl_moe" else None,
        config=dict(top.config),
    )


def _moe(text: _Fields, layers: int) -> MoeSpec:
    step, dense = text.count("decoder_sparse_step", default=1), text.indices("mlp_only_layers")
    return MoeSpec(
        experts=text.count("num_experts", "num_local_experts"),
        per_token=text.count("num_experts_per_tok"),
        ffn=text.count("moe_intermediate_size"),
        dense_layers=tuple(i for i in range(layers) if i in dense or (i + 1) % step),
    )


def _vision(top: _Fields, family: str, text_hidden: int) -> VisionSpec:
    if "vision_config" not in top.config:
        top.wrong("vision_config", "is missing")
        return VisionSpec(1, 1, 1, 1, 1, 1, 1, None, (), 1, positions=1)
    fields = top.child("vision_config")
    # Qwen2-VL calls the tower's width embed_dim, and its hidden_size is the language model's.
    hidden = fields.count("embed_dim" if family == "qwen2_vl" else "hidden_size")
    out_hidden = fields.count("hidden_size" if family == "qwen2_vl" else "out_hidden_size")
    if out_hidden != text_hidden:
        fields.wrong("out_hidden_size", f"is {out_hidden}, but the language model's hidden_size is {text_hidden}")
    three = family.startswith("qwen3")
    return VisionSpec(
        hidden=hidden,
        depth=fields.count("depth", most=_MOST),
        heads=fields.count("num_heads"),
        ffn=_vision_ffn(fields, family, hidden),
        patch=fields.count("patch_size", default=16 if three else 14),
        temporal_patch=fields.count("temporal_patch_size", default=2),
        merge=fields.count("spatial_merge_size", default=2),
        window=fields.count("window_size", default=112) if family == "qwen2_5_vl" else None,
        fullatt_blocks=fields.indices("fullatt_block_indexes", (7, 15, 23, 31)) if family == "qwen2_5_vl" else (),
        out_hidden=out_hidden,
        channels=fields.count("in_channels", "in_chans", default=3),
        positions=fields.count("num_position_embeddings") if three else None,
        deepstack=fields.indices("deepstack_visual_indexes", (8, 16, 24)) if three else (),
    )


def _vision_ffn(fields: _Fields, family: str, hidden: int) -> int:
    if family != "qwen2_vl":
        return fields.count("intermediate_size")
    return hidden * fields.count("mlp_ratio", default=4)
