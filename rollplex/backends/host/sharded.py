"""The rollout actor cut over ranks, in a rollout engine's fused layouts: transformers' layers over our own linears.

embed_tokens    rows of the vocabulary, summed over ranks           lm_head        rows, gathered
q, k, v         one product with [Q; K; V] or the trainer's rows    gate, up       one product, together or interleaved
o, down         columns, stored [O, I] or [I, O]; summed            norms, tower   whole on every rank

Nothing is copied: each weight is a view of the pages that training ranks fill, or of the case-3 buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from rollplex.backends.collectives import Groups
from rollplex.backends.facts import Block
from rollplex.backends.hf.model import HostModel, buffers_to, build_model
from rollplex.backends.shard import Region, Shard


def sharded_model(
    config: Mapping[str, Any],
    shard: Shard,
    snapshot: Tensor,
    buffer: Tensor | None,
    tower: Mapping[str, Tensor],
    groups: Groups,
) -> HostModel:
    """A rank's model over its shard; `tower` has the vision parameters by name. It is for inference only."""
    model = build_model(config, snapshot.dtype)
    held = {r.name: (r, r.held(snapshot, buffer)) for r in shard.regions}
    language = model.model.language_model
    vocab = config.get("text_config", config)["vocab_size"]
    language.embed_tokens = _Embedding(held["embed_tokens.weight"][1], groups)
    head = held.get("lm_head.weight", held["embed_tokens.weight"])[1]
    model.lm_head = _Head(head, vocab, groups)
    for number, layer in enumerate(language.layers):
        _attention(layer.self_attn, f"layers.{number}.self_attn.", held, groups)
        _mlp(layer.mlp, f"layers.{number}.mlp.", held, groups)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            _set(getattr(layer, norm), "weight", held[f"layers.{number}.{norm}.weight"][1])
    _set(language.norm, "weight", held["norm.weight"][1])
    for name, view in tower.items():
        owner, leaf = name.rpartition(".")[::2]
        _set(model.get_submodule(owner), leaf, view)
    buffers_to(model, snapshot.device)
    return model.requires_grad_(False)


def _attention(module: Any, name: str, held: Mapping[str, tuple[Region, Tensor]], groups: Groups) -> None:
    """transformers counts heads by the width of what q, k and v give, so that fewer of them need no change there."""
    region, weight = held[f"{name}qkv.weight"]
    bias = held[f"{name}qkv.bias"][1] if f"{name}qkv.bias" in held else None
    fused = _Fused(weight, bias, region.rows)
    module.q_proj, module.k_proj, module.v_proj = (_Part(fused, part) for part in "qkv")
    region, weight = held[f"{name}o_proj.weight"]
    module.o_proj = _RowParallel(weight, region.transposed, groups)


def _mlp(module: Any, name: str, held: Mapping[str, tuple[Region, Tensor]], groups: Groups) -> None:
    region, weight = held[f"{name}gate_up.weight"]
    fused = _Fused(weight, None, region.rows)
    module.gate_proj, module.up_proj = _Part(fused, "gate"), _Part(fused, "up")
    region, weight = held[f"{name}down_proj.weight"]
    module.down_proj = _RowParallel(weight, region.transposed, groups)


def _set(module: nn.Module, leaf: str, view: Tensor) -> None:
    module._parameters[leaf] = nn.Parameter(view, requires_grad=False)


class _Fused:
    """One product for several parts: the first part that is asked for makes it, the last lets it go.

    Parts whose rows lie together are views of the result; rows in the trainer's order are gathered (re-indexing).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: tuple[Block, ...]) -> None:
        self.weight, self.bias = weight, bias
        self.of = {part: _columns(rows, part, weight.device) for part in dict.fromkeys(b.part for b in rows)}
        self._waiting: set[str] = set()
        self._result: Tensor | None = None

    def part(self, x: Tensor, part: str) -> Tensor:
        """What the rows of one part give for x; each part is asked for once for every x."""
        if self._result is None:
            self._result, self._waiting = linear(x, self.weight, self.bias), set(self.of)
        self._waiting.remove(part)
        result, where = self._result, self.of[part]
        if not self._waiting:
            self._result = None
        return result[..., where] if isinstance(where, slice) else result.index_select(-1, where)


def _columns(rows: tuple[Block, ...], part: str, device: torch.device) -> slice | Tensor:
    """Where the rows of a part lie, in their own order: a slice where they lie together."""
    found: list[tuple[int, range]] = []
    at = 0
    for b in rows:
        if b.part == part:
            found.append((b.start, range(at, at + b.stop - b.start)))
        at += b.stop - b.start
    places = [i for _, span in sorted(found, key=lambda f: f[0]) for i in span]
    if places == list(range(places[0], places[-1] + 1)):
        return slice(places[0], places[-1] + 1)
    return torch.tensor(places, device=device)


class _Part(nn.Module):
    """One part of a fused product, as transformers calls it: `q_proj(x)`."""

    def __init__(self, fused: _Fused, part: str) -> None:
        super().__init__()
        self.fused, self.part = fused, part

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.part(x, self.part)


class _RowParallel(nn.Module):
    """A rank's columns of a weight, on its part of the input; summed over the ranks."""

    def __init__(self, weight: Tensor, transposed: bool, groups: Groups) -> None:
        super().__init__()
        self.weight, self.groups = weight.t() if transposed else weight, groups

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight)
        self.groups.all_reduce("tp", y)
        return y


class _Embedding(nn.Module):
    """A rank's rows of the vocabulary; tokens of other ranks are zero here, and the sum over ranks has them."""

    def __init__(self, weight: Tensor, groups: Groups) -> None:
        super().__init__()
        self.weight, self.groups = weight, groups
        self.first = groups.place("tp") * weight.shape[0]

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.first
        here = (own >= 0) & (own < self.weight.shape[0])
        found = embedding(own.clamp(0, self.weight.shape[0] - 1), self.weight)
        found = found.masked_fill(~here[..., None], 0)
        self.groups.all_reduce("tp", found)
        return found


class _Head(nn.Module):
    """Logits of the whole vocabulary on every rank, without the rows that pad it."""

    def __init__(self, weight: Tensor, vocab: int, groups: Groups) -> None:
        super().__init__()
        self.weight, self.vocab, self.groups = weight, vocab, groups

    def forward(self, hidden: Tensor) -> Tensor:
        return self.groups.all_gather("tp", linear(hidden, self.weight))[..., : self.vocab]
