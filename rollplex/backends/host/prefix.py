"""The prefix of a model call: everything before the last prompt token, run once for a group of responses.

slot = empty(boundary_shape(config, tokens))                          the caller's memory (arena)
result = run_prefix(model, prompt, slot, attached=True, saved=policy)   keys and values are now in the slot
... suffix work reads the slot, its backward leaves dK, dV ...
prefix_backward(result, kv_grads)                                     language prefix, projector, vision tower
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.hf.model import HostModel, set_recompute
from rollplex.backends.training.boundary import Capture, PrefixResult, materialise
from rollplex.backends.training.saved import SavedPolicy


def boundary_shape(config: Mapping[str, Any], prefix_tokens: int, tp: int = 1) -> tuple[int, int, int, int, int]:
    """(layers, 2 for K and V, kv_heads of one of `tp` ranks, prefix_tokens, head_dim) of one prompt's boundary."""
    text = config.get("text_config") or config
    heads = text["num_attention_heads"]
    return (
        text["num_hidden_layers"],
        2,
        text["num_key_value_heads"] // tp,
        prefix_tokens,
        text["hidden_size"] // heads,
    )


def run_prefix(
    model: HostModel,
    prompt: Prompt,
    slot: Tensor,
    *,
    attached: bool,
    saved: SavedPolicy | None = None,
    before: Sequence[Tensor] = (),
) -> PrefixResult:
    """Run prompt[:-1] and write every layer's keys and values into `slot` (boundary_shape, possibly longer).

    Of a history, what lies behind the pieces `before` is run alone.

    Raises OutOfMemory when the prompt is longer than the slot or its saved state larger than the policy's pool.
    """
    forward = partial(_forward, model, prompt)
    return materialise(model, prompt, slot, forward, attached=attached, saved=saved, before=before)


def embed_prompt(model: HostModel, prompt: Prompt, tokens: int) -> Tensor:
    """Input embeddings [1, tokens, hidden] of the first tokens, vision features in their places.

    A frozen tower builds no graph: none of its parameters asks for a gradient.
    """
    ids = prompt.input_ids[None, :tokens]
    hidden = model.model.language_model.embed_tokens(ids)
    if prompt.pixel_values is None or prompt.grid_thw is None:
        return hidden
    if prompt.modality == "video":
        features = model.model.get_video_features(prompt.pixel_values, prompt.grid_thw)
        mask = ids == model.config.video_token_id
    else:
        features = model.model.get_image_features(prompt.pixel_values, prompt.grid_thw)
        mask = ids == model.config.image_token_id
    return hidden.masked_scatter(mask[..., None], torch.cat(features.pooler_output).to(hidden.dtype))


def _forward(model: HostModel, prompt: Prompt, capture: Capture, recompute: bool) -> None:
    set_recompute(model, recompute)
    try:
        _run_layers(model, prompt, capture)
    finally:
        set_recompute(model, False)


def _run_layers(model: HostModel, prompt: Prompt, capture: Capture) -> None:
    """Language layers over the prefix; of the last layer only keys and values are needed, so the rest is not run."""
    language, prompt = model.model.language_model, prompt.on(model.device, model.dtype)
    if capture.start:
        hidden = language.embed_tokens(prompt.input_ids[None, capture.start : prompt.prefix_tokens])
    else:
        hidden = embed_prompt(model, prompt, prompt.prefix_tokens)
    rotary = language.rotary_emb(hidden, prompt.position_ids[:, None, capture.start : prompt.prefix_tokens])
    *layers, last = language.layers
    for layer in layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, io=capture)
    last.self_attn(last.input_layernorm(hidden), attention_mask=None, position_embeddings=rotary, io=capture)
