"""The prefix of a model call: everything before the last prompt token, run once for a group of responses.

slot = empty(boundary_shape(config, tokens))                          the caller's memory (arena)
result = run_prefix(model, prompt, slot, attached=True, saved=policy)   keys and values are now in the slot
... suffix work reads the slot, its backward leaves dK, dV ...
prefix_backward(result, kv_grads)                                     language prefix, projector, vision tower
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rollplex.backends.host.attention import causal
from rollplex.backends.host.model import HostModel, set_recompute
from rollplex.backends.host.prompts import Prompt
from rollplex.backends.host.saved import AddressRanges, SavedPolicy, SavedState
from rollplex.ir.errors import OutOfMemory


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


Forward = Callable[["Capture", bool], None]
"""Runs a prompt's prefix through an engine's layers, which hand the capture their keys and values; may recompute."""


@dataclass
class PrefixResult:
    """One prompt's prefix, materialised: `kv` [layers, 2, kv_heads, prefix, head_dim] is the filled part of the slot.

    Attached results also hold what the backward starts from: gradient edges, never a second copy of keys or values.
    """

    model: Any
    prompt: Prompt
    kv: Tensor
    saved: SavedPolicy
    forward: Forward
    edges: list[GradientEdge | None] = field(default_factory=list)
    state: SavedState | None = None
    attached: bool = False

    @property
    def saved_nbytes(self) -> int:
        """Measured bytes of saved state (0 for a detached or dropped prefix)."""
        return self.state.nbytes if self.state else 0


def run_prefix(
    model: HostModel, prompt: Prompt, slot: Tensor, *, attached: bool, saved: SavedPolicy | None = None
) -> PrefixResult:
    """Run prompt[:-1] and write every layer's keys and values into `slot` (boundary_shape, possibly longer).

    Raises OutOfMemory when the prompt is longer than the slot or its saved state larger than the policy's pool.
    """
    return materialise(model, prompt, slot, partial(_forward, model, prompt), attached=attached, saved=saved)


def materialise(
    model: Any, prompt: Prompt, slot: Tensor, forward: Forward, *, attached: bool, saved: SavedPolicy | None
) -> PrefixResult:
    """`run_prefix` of whichever engine `forward` runs; `model.parameters()` are weights, which are not saved state."""
    policy = saved or SavedPolicy()
    kv = _filled_part(slot, prompt)
    result = PrefixResult(model, prompt, kv, policy, forward, attached=attached)
    if attached and policy.where != "dropped":
        _run_attached(result, kv)
    else:
        with torch.no_grad():
            forward(Capture(kv, kv.shape[0]), False)
    return result


def prefix_backward(result: PrefixResult, kv_grads: Tensor) -> None:
    """Accumulate parameter gradients from d(loss)/d(kv), a tensor shaped like `result.kv`; once for each result.

    One backward carries dK and dV of every layer into the language prefix, the merger and the vision tower. A dropped
    prefix is run again first; its keys and values are not written anywhere.
    """
    assert result.attached, "a detached prefix has no backward"
    if result.saved.where == "dropped":
        _run_attached(result, None)
    assert result.edges, "a prefix backward runs once"
    grads = [g[None] for layer in kv_grads.unbind(0) for g in layer.unbind(0)]
    wanted = [(e, g) for e, g in zip(result.edges, grads, strict=True) if e is not None]
    torch.autograd.backward([e for e, _ in wanted], [g for _, g in wanted])
    result.edges, result.state = [], None


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


def _filled_part(slot: Tensor, prompt: Prompt) -> Tensor:
    if prompt.prefix_tokens > slot.shape[3]:
        raise OutOfMemory(
            f"the prompt has {prompt.prefix_tokens} prefix tokens, its boundary slot {slot.shape[3]}",
            where=prompt.row,
            hint="raise workload.prompt_tokens, or lower frames or max_pixels",
        )
    return slot[:, :, :, : prompt.prefix_tokens]


def _run_attached(result: PrefixResult, kv: Tensor | None) -> None:
    prompt = result.prompt
    inputs = [t for t in (prompt.input_ids, prompt.pixel_values) if t is not None]
    state = SavedState(result.saved, AddressRanges([*result.model.parameters(), *inputs]), prompt.row)
    capture = Capture(kv, result.kv.shape[0])
    with state.hooks(), torch.enable_grad():
        result.forward(capture, result.saved.recompute == "full")
    result.edges, result.state = capture.edges, state


def _forward(model: HostModel, prompt: Prompt, capture: Capture, recompute: bool) -> None:
    set_recompute(model, recompute)
    try:
        _run_layers(model, prompt, capture)
    finally:
        set_recompute(model, False)


def _run_layers(model: HostModel, prompt: Prompt, capture: Capture) -> None:
    """Language layers over the prefix; of the last layer only keys and values are needed, so the rest is not run."""
    language = model.model.language_model
    hidden = embed_prompt(model, prompt, prompt.prefix_tokens)
    rotary = language.rotary_emb(hidden, prompt.position_ids[:, None, : prompt.prefix_tokens])
    *layers, last = language.layers
    for layer in layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, io=capture)
    last.self_attn(last.input_layernorm(hidden), attention_mask=None, position_embeddings=rotary, io=capture)


class Capture:
    """Copies each layer's keys and values out and remembers where their gradients enter the graph.

    A checkpointed layer comes here again in the backward; by then the slot may belong to someone else, so only the
    first visit writes.
    """

    def __init__(self, kv: Tensor | None, layers: int) -> None:
        self.kv = kv
        self.layers = layers
        self.visited = 0
        self.edges: list[GradientEdge | None] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if layer == self.visited:
            self.visited += 1
            self._take(layer, key, value)
        return query if layer == self.layers - 1 else causal(query, key, value, scale)

    def _take(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.edges += [get_gradient_edge(t) if t.requires_grad else None for t in (key, value)]
        if self.kv is not None:
            self.kv[layer, 0].copy_(key[0].detach())
            self.kv[layer, 1].copy_(value[0].detach())
