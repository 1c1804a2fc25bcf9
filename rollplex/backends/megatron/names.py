"""Every parameter of a rank of the Megatron model as ranges of Hugging Face tensors: a bijection, to the bit.

linear_qkv     rows [q0 .. q(n-1) k v] of each KV group, an even share of them a rank         q_proj, k_proj, v_proj
linear_fc1     [gate_r; up_r], or two parameters where the plan lays them apart               gate_proj, up_proj
linear_proj, linear_fc2      columns of a rank, stored [O, I / tp] or [I / tp, O]             o_proj, down_proj
word_embeddings, output_layer      rows of a rank; rows behind the vocabulary are padding     embed_tokens, lm_head
norms, tower                 the same on every rank

The rows of fused weights are the engine's facts: what the compiler plans with is what the runtime does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from rollplex.backends.facts import Block
from rollplex.backends.megatron.facts import FACTS
from rollplex.ir.planned_layout import LayoutSummary
from rollplex.ir.spec import ModelSpec, Part, Tensor


@dataclass(frozen=True)
class Stored:
    """How the plan lays out what an engine could hold in two ways.

    `transposed` are the row-parallel weights (`o`, `down`) whose parameter is [I, O]; `split_gate_up` makes gate and up
    two parameters.
    """

    transposed: frozenset[str] = field(default_factory=frozenset)
    split_gate_up: bool = False

    @classmethod
    def planned(cls, layout: LayoutSummary) -> Stored:
        """As a plan's layout has it: `transpose` of a row-parallel class, `slabs` of gate and up."""
        views = {c.name: c.view for c in layout.classes}
        transposed = frozenset(name for name, view in views.items() if view == "transpose")
        return cls(transposed, views.get("gate_up") == "slabs")


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) along `axis` of the Hugging Face tensor `source`; they begin at row `at` of the parameter."""

    source: str
    axis: int
    start: int
    stop: int
    at: int = 0


@dataclass(frozen=True)
class Parameter:
    """One parameter of one rank, in the shape it is stored in; `sharded` tells a share from a copy."""

    name: str
    part: Part
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    sharded: bool = False
    transposed: bool = False

    @property
    def numel(self) -> int:
        """Elements of this rank's parameter."""
        return math.prod(self.shape)


def parameters(spec: ModelSpec, tp: int = 1, rank: int = 0, stored: Stored | None = None) -> tuple[Parameter, ...]:
    """All parameters of a rank: the language model's, then the tower's, in the order of transformers."""
    made = _Rank(spec, tp, rank, stored or Stored())
    return (*made.language(), *(_tower(t) for t in spec.tensors() if t.part == "vision"))


def rows(parameter: Parameter, piece: Piece, value: torch.Tensor) -> torch.Tensor:
    """The part of a stored parameter that is this piece, as Hugging Face has it: a view of `value`."""
    oriented = value.t() if parameter.transposed else value
    return oriented.narrow(piece.axis, piece.at, piece.stop - piece.start)


# ---- language model

_HF = "model.language_model."
_MEGATRON = "language."


@dataclass(frozen=True)
class _Rank:
    spec: ModelSpec
    tp: int
    rank: int
    stored: Stored

    def language(self) -> Iterator[Parameter]:
        rows = self.spec.padded_vocab(self.tp) // self.tp
        yield self._vocabulary("embedding.word_embeddings", f"{_HF}embed_tokens.weight", rows)
        for layer in range(self.spec.layers):
            yield from self._attention(layer)
            yield from self._feed_forward(layer)
            for ours, theirs in (("input", "input"), ("pre_mlp", "post_attention")):
                yield self._norm(f"decoder.layers.{layer}.{ours}_layernorm", f"layers.{layer}.{theirs}_layernorm")
        yield self._norm("decoder.final_layernorm", "norm")
        if not self.spec.tied:
            yield self._vocabulary("output_layer", "lm_head.weight", rows)

    def _vocabulary(self, name: str, source: str, rows: int) -> Parameter:
        start, stop = (min(r * rows, self.spec.vocab) for r in (self.rank, self.rank + 1))
        pieces = (Piece(source, 0, start, stop),) if start < stop else ()
        return self._make(f"{name}.weight", (rows, self.spec.hidden), pieces)

    def _attention(self, layer: int) -> Iterator[Parameter]:
        ours, theirs = f"decoder.layers.{layer}.self_attention.", f"{_HF}layers.{layer}.self_attn."
        sources = {part: f"{theirs}{part}_proj" for part in "qkv"}
        qkv = FACTS.rows(self.spec, "qkv", self.tp, self.rank)
        yield self._rows(f"{ours}linear_qkv.weight", qkv, sources, self.spec.hidden)
        yield self._rows(f"{ours}linear_qkv.bias", qkv, sources)
        width = self.spec.heads * self.spec.head_dim
        yield self._columns("o", f"{ours}linear_proj.weight", f"{theirs}o_proj.weight", width)

    def _feed_forward(self, layer: int) -> Iterator[Parameter]:
        ours, theirs = f"decoder.layers.{layer}.mlp.", f"{_HF}layers.{layer}.mlp."
        sources = {part: f"{theirs}{part}_proj" for part in ("gate", "up")}
        blocks = FACTS.rows(self.spec, "gate_up", self.tp, self.rank)
        if self.stored.split_gate_up:
            for block in blocks:
                yield self._rows(f"{ours}linear_fc1.{block.part}.weight", (block,), sources, self.spec.hidden)
        else:
            yield self._rows(f"{ours}linear_fc1.weight", blocks, sources, self.spec.hidden)
        yield self._columns("down", f"{ours}linear_fc2.weight", f"{theirs}down_proj.weight", self.spec.ffn)

    def _rows(self, name: str, blocks: tuple[Block, ...], sources: dict[str, str], *rest: int) -> Parameter:
        """Blocks of rows of several tensors, one behind the other; without `rest` they are biases."""
        pieces, at = [], 0
        for b in blocks:
            leaf = name.rpartition(".")[2]
            pieces.append(Piece(f"{sources[b.part]}.{leaf}", 0, b.start, b.stop, at))
            at += b.stop - b.start
        return self._make(name, (at, *rest), tuple(pieces))

    def _columns(self, kind: str, name: str, source: str, width: int) -> Parameter:
        share, transposed = width // self.tp, kind in self.stored.transposed
        piece = Piece(source, 1, self.rank * share, (self.rank + 1) * share)
        shape = (share, self.spec.hidden) if transposed else (self.spec.hidden, share)
        return self._make(name, shape, (piece,), transposed=transposed)

    def _norm(self, name: str, source: str) -> Parameter:
        piece = Piece(f"{_HF}{source}.weight", 0, 0, self.spec.hidden)
        return Parameter(f"{_MEGATRON}{name}.weight", "language", (self.spec.hidden,), (piece,))

    def _make(
        self, name: str, shape: tuple[int, ...], pieces: tuple[Piece, ...], transposed: bool = False
    ) -> Parameter:
        """A share of the rank; where there is one rank it is the whole."""
        return Parameter(_MEGATRON + name, "language", shape, pieces, self.tp > 1, transposed)


# ---- tower: one parameter for one tensor

_TOWER = (
    (r"\.norm1\.", ".input_layernorm."),
    (r"\.norm2\.", ".pre_mlp_layernorm."),
    (r"\.attn\.qkv\.", ".self_attention.linear_qkv."),
    (r"\.attn\.proj\.", ".self_attention.linear_proj."),
    (r"\.(gate|up)_proj\.", r".linear_fc1.\1."),
    (r"\.down_proj\.", ".linear_fc2."),
    (r"^merger\.ln_q\.", "ln_q."),
    (r"^merger\.mlp\.0\.", "projector.encoder.linear_fc1."),
    (r"^merger\.mlp\.2\.", "projector.encoder.linear_fc2."),
)


def _tower(tensor: Tensor) -> Parameter:
    name = tensor.name.removeprefix("model.visual.")
    for theirs, ours in _TOWER:
        name = re.sub(theirs, ours, name)
    return Parameter(f"vision.{name}", "vision", tensor.shape, (Piece(tensor.name, 0, 0, tensor.shape[0]),))
