"""Ranges of Hugging Face tensors on every rank of a Megatron model: a bijection, and the shapes that Megatron has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_tiny import CONFIG, tied
from megatron_tiny import CASE_2
from torch import Tensor

from rollplex.backends.megatron.model import build_model
from rollplex.backends.megatron.names import Parameter, Stored, parameters
from rollplex.backends.megatron.rank import PARTS
from rollplex.ir.models import ModelSpec, load_model, spec_from_config

MODELS = ["qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen2.5-vl-32b", "qwen2.5-vl-72b"]


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, those that touch made one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found


def degrees(spec: ModelSpec) -> list[int]:
    return [tp for tp in spec.legal_tp() if tp <= spec.kv_heads]


@pytest.mark.parametrize("stored", [Stored(), CASE_2], ids=["stock", "case 2"])
@pytest.mark.parametrize("name", MODELS)
def test_every_row_of_every_tensor_is_on_exactly_one_rank(name: str, stored: Stored) -> None:
    """Shares tile their tensors, copies are whole on each rank; and a rank has the bytes that the compiler counts."""
    spec = load_model(name)
    for tp in degrees(spec):
        held: dict[str, list[tuple[int, int]]] = {t.name: [] for t in spec.tensors()}
        for rank in range(tp):
            order = parameters(spec, tp, rank, stored)
            for piece in (piece for parameter in order for piece in parameter.pieces):
                held[piece.source].append((piece.start, piece.stop))
            for part in PARTS:
                assert sum(p.numel for p in order if p.part == part) == spec.rank_parameters(tp, part)
        for t in spec.tensors():
            whole = [(0, t.shape[t.axis or 0])]
            assert joined(held[t.name]) == (whole if t.axis is not None else whole * tp), (t.name, tp)


@pytest.mark.parametrize("stored", [Stored(), CASE_2], ids=["stock", "case 2"])
@pytest.mark.parametrize("config", [CONFIG, tied(CONFIG)], ids=["untied", "tied"])
def test_the_model_has_these_parameters(config: dict[str, Any], stored: Stored) -> None:
    """Names and shapes are those of Megatron's own modules."""
    spec = spec_from_config(config, "tiny")
    wanted = {n: tuple(p.shape) for n, p in build_model(spec, torch.float32, None, stored).named_parameters()}
    assert {p.name: p.shape for p in parameters(spec, stored=stored)} == wanted


# ---- by reshaping whole tensors, as Megatron's own converters do


def grouped(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """[q .. q, k, v] for each KV group."""
    parts = [t.reshape(groups, -1, *t.shape[1:]) for t in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def reference(spec: ModelSpec, tensors: dict[str, Tensor], tp: int, rank: int) -> dict[str, Tensor]:
    """The parameters of a rank's layer 1, embedding and head."""
    layer = {n.partition("layers.1.")[2]: t for n, t in tensors.items() if "language_model.layers.1." in n}
    found = {}
    for leaf in ("weight", "bias"):
        q, k, v = (layer[f"self_attn.{part}_proj.{leaf}"] for part in "qkv")
        rows = grouped(q, k, v, spec.kv_heads)
        found[f"language.decoder.layers.1.self_attention.linear_qkv.{leaf}"] = rows.chunk(tp)[rank]
    gate, up = (layer[f"mlp.{part}_proj.weight"].chunk(tp)[rank] for part in ("gate", "up"))
    found["language.decoder.layers.1.mlp.linear_fc1.weight"] = torch.cat([gate, up])
    found["language.decoder.layers.1.mlp.linear_fc2.weight"] = layer["mlp.down_proj.weight"].chunk(tp, 1)[rank]
    found["language.decoder.layers.1.self_attention.linear_proj.weight"] = layer["self_attn.o_proj.weight"].chunk(
        tp, 1
    )[rank]
    vocabulary = {"embedding.word_embeddings": "model.language_model.embed_tokens", "output_layer": "lm_head"}
    for ours, theirs in vocabulary.items():
        whole = tensors[f"{theirs}.weight"]
        padding = torch.zeros(spec.padded_vocab() - len(whole), whole.shape[1])
        found[f"language.{ours}.weight"] = torch.cat([whole, padding]).chunk(tp)[rank]
    return found


def assembled(parameter: Parameter, tensors: dict[str, Tensor]) -> Tensor:
    """The parameter as its pieces say, always as [O, I]."""
    pieces = [tensors[p.source].narrow(p.axis, p.start, p.stop - p.start) for p in parameter.pieces]
    rows = torch.cat(pieces)
    short = (parameter.shape[1] if parameter.transposed else parameter.shape[0]) - len(rows)
    return torch.cat([rows, torch.zeros(short, *rows.shape[1:])])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_order_is_megatrons(tp: int) -> None:
    """7B's shape, made narrow: the pieces of a rank are what reshaping the whole tensors gives."""
    text = {**CONFIG["text_config"], "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 56}
    vision = {**CONFIG["vision_config"], "out_hidden_size": 56}
    spec = spec_from_config({**CONFIG, "text_config": {**text, "vocab_size": 250}, "vision_config": vision}, "narrow")
    rng = torch.Generator().manual_seed(0)
    tensors = {t.name: torch.randn(t.shape, generator=rng) for t in spec.tensors()}
    for rank in range(tp):
        wanted = reference(spec, tensors, tp, rank)
        found = {p.name: p for p in parameters(spec, tp, rank)}
        for name, value in wanted.items():
            assert found[name].shape == tuple(value.shape)
            assert torch.equal(assembled(found[name], tensors), value), name
