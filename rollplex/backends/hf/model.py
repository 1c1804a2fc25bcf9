"""The host actor: transformers' own Qwen2.5-VL modules over parameters that live in memory the caller owns.

model = build_model(config, torch.float32)                  no weight is allocated
views = {name: arena_view(shape) for name, shape in parameter_shapes(config).items()}
bind(model, views)                                          every parameter is now a view of the arena
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging as transformers_logging

from rollplex.backends.hf.attention import install_attention
from rollplex.backends.hf.precision import keep_double
from rollplex.backends.hf.windows import install_windows
from rollplex.ir.errors import JobError

HostModel = Any  # a Qwen2_5_VLForConditionalGeneration; its annotations are too loose for a type checker


def read_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a directory or file as a dict; JobError when it cannot be read."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise JobError(f"cannot read the model config: {err}", where=file) from None


def build_model(config: Mapping[str, Any], dtype: torch.dtype, head: str = "logits") -> HostModel:
    """A Qwen2.5-VL from a config.json dict with every parameter on the meta device in `dtype`; buffers are real.

    With the head `scalar` it ends in `score`, one number a token without a bias, instead of `lm_head`.
    Raises JobError for another architecture, sliding windows or attention dropout (a split call must be exact).
    """
    parsed = parsed_config(config)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: HostModel = Qwen2_5_VLForConditionalGeneration(parsed)
        if head == "scalar":
            del model.lm_head
            model.score = nn.Linear(parsed.text_config.hidden_size, 1, bias=False)
    for module in model.modules():
        _to_dtype(module, dtype)
    _tie(model)
    _make_buffers_real(model)
    install_attention(model.config.text_config)
    install_windows(model.config.vision_config)
    if dtype == torch.float64:
        keep_double(model)
    return model.train()


def parameter_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter in named_parameters order; a tied head is listed once, as the embedding."""
    return {name: tuple(p.shape) for name, p in build_model(config, torch.float32).named_parameters()}


def bind(model: HostModel, views: Mapping[str, Tensor]) -> None:
    """Replace every parameter by a view of the caller's memory, in place; nothing keeps a copy of the old ones.

    `views` has exactly the names of named_parameters(), with their shapes and dtype (AssertionError otherwise). The
    views must stay at their addresses; their pages may be unmapped and mapped again while no call is running. Buffers
    go where the views are.
    """
    wanted = dict(model.named_parameters())
    assert wanted.keys() == views.keys(), f"names differ: {sorted(wanted.keys() ^ views.keys())[:5]}"
    for name, old in wanted.items():
        new = views[name]
        assert (new.shape, new.dtype) == (old.shape, old.dtype), f"{name}: {new.shape} {new.dtype} for {old.shape}"
        owner, leaf = name.rpartition(".")[::2]
        model.get_submodule(owner)._parameters[leaf] = nn.Parameter(new, requires_grad=old.requires_grad)
    _tie(model)
    buffers_to(model, next(iter(views.values())).device)


def buffers_to(model: HostModel, device: torch.device) -> None:
    """Rotary frequencies to the device on which the parameters lie."""
    for module in model.modules():
        module._buffers = {name: b if b is None else b.to(device) for name, b in module._buffers.items()}
        if getattr(module, "original_inv_freq", None) is not None:
            module.original_inv_freq = module.original_inv_freq.to(device)


def freeze(model: HostModel, prefixes: Iterable[str]) -> None:
    """Parameters whose name starts with one of the prefixes (`model.visual.`) get no gradient and build no graph."""
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(prefixes)):
            parameter.requires_grad_(False)


def set_recompute(model: HostModel, full: bool) -> None:
    """Whether layers of the tower and of the language model keep only their inputs (non-reentrant checkpoint)."""
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = full
            module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def parse_config(config: Mapping[str, Any], engine: str) -> Any:
    """A Qwen2.5-VL's config.json dict as transformers reads it, defaults included; JobError for another model."""
    if config.get("model_type") != "qwen2_5_vl":
        raise JobError(
            f"the {engine} backend runs model_type qwen2_5_vl, not {config.get('model_type')!r}",
            hint="use a Qwen2.5-VL config.json; examples/shapes/model has a small one",
        )
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its advice on defaults is not for our users
    parsed = Qwen2_5_VLConfig.from_dict(dict(config))
    transformers_logging.set_verbosity(level)
    return parsed


def parsed_config(config: Mapping[str, Any]) -> Any:
    """The config of a model that the host backend runs; JobError for any other."""
    parsed = parse_config(config, "host")
    if parsed.text_config.use_sliding_window or parsed.text_config.attention_dropout:
        raise JobError("the host backend has no sliding window and no attention dropout", hint="set both to 0 / false")
    return parsed


def _to_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    for leaf, old in module._parameters.items():
        if old is not None:
            module._parameters[leaf] = nn.Parameter(old.to(dtype))


def _tie(model: HostModel) -> None:
    if model.config.tie_word_embeddings and hasattr(model, "lm_head"):
        model.lm_head.weight = model.model.language_model.embed_tokens.weight


def _make_buffers_real(model: HostModel) -> None:
    """Rotary frequencies are made again by the module's own constructor: on the meta device they have no values."""
    for module in model.modules():
        if module._buffers:
            fresh = type(module)(module.config)
            module._buffers = {name: fresh._buffers[name] for name in module._buffers}
    assert all(b.device.type != "meta" for b in model.buffers())
