"""Row orders of fused weights that more than one engine uses (paper section 3.3)."""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.backends.facts import Block, rank_range
from rollplex.ir.models import ModelSpec


def stacked(spec: ModelSpec, fused: str, tp: int, rank: int) -> tuple[Block, ...]:
    """One block a part: `[Q_r; K_r; V_r]` and `[gate_r; up_r]`; with more ranks than KV heads they repeat a head."""
    if fused != "qkv":
        start, stop = rank_range(_width(spec, fused), tp, rank)
        return (Block("gate", start, stop), Block("up", start, stop))
    head = spec.head_dim
    q0, q1 = rank_range(spec.heads, tp, rank)
    k0, k1 = rank_range(spec.kv_heads, tp, rank) if tp <= spec.kv_heads else _replicated(spec.kv_heads, tp, rank)
    return (Block("q", q0 * head, q1 * head), *(Block(p, k0 * head, k1 * head) for p in ("k", "v")))


def grouped(spec: ModelSpec, fused: str, tp: int, rank: int) -> tuple[Block, ...]:
    """Megatron's `linear_qkv`: for every KV group its query heads, then its key head, then its value head.

    A rank has an even share of all rows, whether or not it ends between two groups.
    """
    if fused != "qkv":
        return stacked(spec, fused, tp, rank)
    blocks = list(_groups(spec))
    start, stop = rank_range(sum(b.stop - b.start for b in blocks), tp, rank)
    return tuple(_cut(blocks, start, stop))


def _groups(spec: ModelSpec) -> Iterator[Block]:
    """All rows of QKV in Megatron's order."""
    head, per_group = spec.head_dim, spec.heads // spec.kv_heads
    for group in range(spec.kv_heads):
        yield Block("q", group * per_group * head, (group + 1) * per_group * head)
        yield from (Block(p, group * head, (group + 1) * head) for p in ("k", "v"))


def _cut(blocks: list[Block], start: int, stop: int) -> Iterator[Block]:
    """Rows [start, stop) of blocks that lie one behind the other."""
    at = 0
    for b in blocks:
        first, last = max(start - at, 0), min(stop - at, b.stop - b.start)
        if first < last:
            yield Block(b.part, b.start + first, b.start + last)
        at += b.stop - b.start


def _width(spec: ModelSpec, fused: str) -> int:
    """Rows of gate (and of up): of the dense layers, or of one expert."""
    if fused == "gate_up":
        return spec.ffn
    assert spec.moe is not None, f"{spec.name} has no experts"
    return spec.moe.ffn


def _replicated(kv_heads: int, tp: int, rank: int) -> tuple[int, int]:
    """The one KV head that a rank repeats when there are more ranks than heads."""
    head = rank * kv_heads // tp
    return head, head + 1
