"""Where every tensor of a rollout shard lies: a region of the snapshot that q training ranks write, or of a buffer.

snapshot  |embed0 embed1|qkv0 qkv1|bias0 bias1|o0 o1|fc1_0 fc1_1|down0 down1|norm|norm| ..    slab j: training rank j
case 3    |qkv|bias| ..                                                         rows in the engine's own order

A rollout shard is made tensor by tensor, so that an engine reads each as one piece; what all ranks have (norms) lies
there once. The rows of fused weights are the engines' facts: what the compiler planned with is what the runtime does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from rollplex.backends.facts import Block, EngineFacts
from rollplex.ir.errors import RunError
from rollplex.ir.planned_layout import LayoutSummary
from rollplex.ir.spec import ModelSpec


@dataclass(frozen=True)
class Region:
    """One tensor of a rollout shard.

    In the snapshot it is `slabs` pieces, one of each training rank of the group, end to end; `blocks` are its rows in
    that order, of fused weights. Where the trainer holds a fused weight as `parts` parameters, each part has its own
    slabs. `axis` is what the slabs are cut along: 0 rows, 1 columns, None where all ranks hold the whole; a transposed
    region lies as [I, O]. The engine reads the region itself or, where `own` is set, elements [own, own + numel) of the
    case-3 buffer, with the rows `read`.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    slabs: int = 1
    axis: Literal[0, 1] | None = None
    transposed: bool = False
    parts: int = 1
    blocks: tuple[Block, ...] = ()
    own: int | None = None
    read: tuple[Block, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the whole region."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """The first element behind it."""
        return self.start + self.numel

    def gathered(self, snapshot: Tensor) -> Iterator[Tensor]:
        """[slabs, elements] for each part: row j is training rank j's, and the others are written by theirs."""
        if self.axis is not None:
            yield from snapshot[self.start : self.stop].view(self.parts, self.slabs, -1)

    def held(self, snapshot: Tensor, buffer: Tensor | None) -> Tensor:
        """What the rollout engine reads, in the shape it is stored in: [O, I], or [I, O] where it is transposed."""
        shape = self.shape[::-1] if self.transposed else self.shape
        if self.own is None:
            return snapshot[self.start : self.stop].view(shape)
        assert buffer is not None, f"{self.name} is rebuilt, and there is no buffer"
        return buffer[self.own : self.own + self.numel].view(self.shape)

    @property
    def rows(self) -> tuple[Block, ...]:
        """The rows of a fused weight in the order in which the rollout engine reads them."""
        return self.blocks if self.own is None else self.read


@dataclass(frozen=True)
class Shard:
    """All regions of one rollout rank's language model, in their order in the snapshot."""

    regions: tuple[Region, ...]

    @property
    def numel(self) -> int:
        """Elements of the snapshot."""
        return self.regions[-1].stop

    @property
    def rebuilt(self) -> tuple[Region, ...]:
        """What the rollout engine reads from the case-3 buffer."""
        return tuple(r for r in self.regions if r.own is not None)

    @property
    def buffer_numel(self) -> int:
        """Elements of the case-3 buffer."""
        return sum(r.numel for r in self.rebuilt)

    def tensors(self, snapshot: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of an unfused whole model, a view of its region: `layers.0.self_attn.q_proj.weight`."""
        for region in self.regions:
            held = region.held(snapshot, None)
            if not region.blocks:
                yield region.name, held
                continue
            base, _, leaf = region.name.rpartition(".")
            parts = held.split([b.stop - b.start for b in region.blocks])
            for block, part in zip(region.blocks, parts, strict=True):
                yield f"{base.rpartition('.')[0]}.{block.part}_proj.{leaf}", part

    def send(self, place: int, own: Tensor, peer: Tensor) -> None:
        """The slabs of training rank `place` of the group, from its own snapshot into a peer's."""
        for region in self.regions:
            for slabs, into in zip(region.gathered(own), region.gathered(peer), strict=True):
                into[place].copy_(slabs[place])

    def rebuild(self, snapshot: Tensor, buffer: Tensor) -> None:
        """Copy and permute what the engine cannot read where it lies; after every slab of the snapshot is there."""
        for region in self.rebuilt:
            source, into = snapshot[region.start : region.stop], region.held(snapshot, buffer)
            if region.axis == 1:
                pieces = source.view(region.slabs, region.shape[0], -1)
                into.view(region.shape[0], region.slabs, -1).copy_(pieces.transpose(0, 1))
            else:
                order = order_of(region.blocks, region.read).to(into.device)
                torch.index_select(source.view(region.shape), 0, order, out=into)


def shard_of(
    spec: ModelSpec, layout: LayoutSummary, trainer: EngineFacts, roller: EngineFacts, tp: int, rank: int
) -> Shard:
    """The shard of rollout rank `rank` of `tp`, as the plan's layout has it.

    RunError where a rank would need rows that its group of training ranks does not hold.
    """
    views = {c.name: c.view for c in layout.classes}
    return Shard(tuple(_Regions(spec, layout.q, views, trainer, roller, tp, rank).all()))


def whole_shard(spec: ModelSpec, facts: EngineFacts) -> Shard:
    """The shard of an engine that holds the whole model and orders it as the rollout engine does."""
    kinds = ("embed", "qkv", "o", "gate_up", "down", "head")
    return Shard(tuple(_Regions(spec, 1, dict.fromkeys(kinds, "alias"), facts, facts, 1, 0).all()))


class _Regions:
    """One walk over the tensors of a rank, in the order of transformers with fused weights as one."""

    def __init__(
        self,
        spec: ModelSpec,
        q: int,
        views: Mapping[str, str],
        trainer: EngineFacts,
        roller: EngineFacts,
        tp: int,
        rank: int,
    ) -> None:
        self.spec, self.q, self.tp, self.rank = spec, q, tp, rank
        self.trainer, self.roller, self.views = trainer, roller, views
        self.at = self.own = 0

    def all(self) -> Iterator[Region]:
        spec, hidden = self.spec, self.spec.hidden
        rows = spec.padded_vocab(self.tp * self.q) // self.tp
        yield self._cut("embed", "embed_tokens.weight", (rows, hidden))
        for layer in range(spec.layers):
            attention, mlp = f"layers.{layer}.self_attn.", f"layers.{layer}.mlp."
            yield from self._fused("qkv", attention + "qkv", hidden)
            yield self._columns("o", attention + "o_proj.weight", spec.heads * spec.head_dim)
            yield from self._fused("gate_up", mlp + "gate_up", hidden)
            yield self._columns("down", mlp + "down_proj.weight", spec.ffn)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield self._whole(f"layers.{layer}.{norm}.weight", (hidden,))
        yield self._whole("norm.weight", (hidden,))
        if spec.head == "scalar":
            yield self._whole("score.weight", (1, hidden))
        elif not spec.tied:
            yield self._cut("head", "lm_head.weight", (rows, hidden))

    def _fused(self, kind: str, name: str, hidden: int) -> Iterator[Region]:
        view, read = self.views[kind], self.roller.rows(self.spec, kind, self.tp, self.rank)
        blocks = self._joined(kind)
        names = tuple(dict.fromkeys(b.part for b in blocks))
        if view == "slabs":  # the trainer holds a parameter for each part: parts lie one behind the other
            blocks = tuple(b for part in names for b in blocks if b.part == part)
        parts = len(names) if view == "slabs" else 1
        rows = sum(b.stop - b.start for b in blocks)
        rebuilt = view == "rebuild"
        if rebuilt and not _same_rows(blocks, read):
            what = f"rollout rank {self.rank} of {self.tp} reads {kind} rows that its {self.q} training ranks lack"
            raise RunError(what, where="layout", hint="choose a rollout tensor_parallel of at most the KV heads")
        shapes = {"weight": (rows, hidden)} | ({"bias": (rows,)} if kind == "qkv" and self.spec.qkv_bias else {})
        for leaf, shape in shapes.items():
            yield self._region(
                f"{name}.{leaf}", shape, self.q, 0, parts=parts, blocks=blocks, read=read, rebuilt=rebuilt
            )

    def _joined(self, kind: str) -> tuple[Block, ...]:
        """The rows of the training ranks of this shard, rank after rank."""
        ranks = range(self.rank * self.q, (self.rank + 1) * self.q)
        return tuple(b for r in ranks for b in self.trainer.rows(self.spec, kind, self.tp * self.q, r))

    def _columns(self, kind: str, name: str, width: int) -> Region:
        view, shape = self.views[kind], (self.spec.hidden, width // self.tp)
        return self._region(name, shape, self.q, 1, transposed=view == "transpose", rebuilt=view == "rebuild")

    def _cut(self, kind: str, name: str, shape: tuple[int, ...]) -> Region:
        assert self.views[kind] == "alias", f"{kind} is {self.views[kind]}"
        return self._region(name, shape, self.q, 0)

    def _whole(self, name: str, shape: tuple[int, ...]) -> Region:
        return self._region(name, shape, 1, None)

    def _region(
        self,
        name: str,
        shape: tuple[int, ...],
        slabs: int,
        axis: Literal[0, 1] | None,
        *,
        transposed: bool = False,
        parts: int = 1,
        blocks: tuple[Block, ...] = (),
        read: tuple[Block, ...] = (),
        rebuilt: bool = False,
    ) -> Region:
        own = self.own if rebuilt else None
        made = Region(name, self.at, shape, slabs, axis, transposed, parts, blocks, own, read)
        self.at += made.numel
        self.own += made.numel if rebuilt else 0
        return made


def _numbers(blocks: tuple[Block, ...]) -> Iterator[tuple[str, int]]:
    return ((b.part, row) for b in blocks for row in range(b.start, b.stop))


@cache
def _same_rows(have: tuple[Block, ...], want: tuple[Block, ...]) -> bool:
    """Whether both have the same rows, in whatever order; every layer asks."""
    return sorted(_numbers(have)) == sorted(_numbers(want))


@cache
def order_of(have: tuple[Block, ...], want: tuple[Block, ...]) -> Tensor:
    """For each wanted row, its place among the rows that are there; every layer asks in every update."""
    place = {number: at for at, number in enumerate(_numbers(have))}
    return torch.tensor([place[number] for number in _numbers(want)])
