"""Row orders of fused weights that more than one engine uses (engines.md facts, paper section 3.3)."""

from __future__ import annotations

from rollplex.backends.facts import Block, rank_range
from rollplex.ir.models import ModelSpec


def stacked(spec: ModelSpec, fused: str, tp: int, rank: int) -> tuple[Block, ...]:
    """One block a part: `[Q_r; K_r; V_r]` and `[gate_r; up_r]`."""
    if fused == "gate_up":
        start, stop = rank_range(spec.ffn, tp, rank)
        return (Block("gate", start, stop), Block("up", start, stop))
    head = spec.head_dim
    q0, q1 = rank_range(spec.heads, tp, rank)
    k0, k1 = rank_range(spec.kv_heads, tp, rank) if tp <= spec.kv_heads else _replicated(spec.kv_heads, tp, rank)
    return (Block("q", q0 * head, q1 * head), *(Block(p, k0 * head, k1 * head) for p in ("k", "v")))


def grouped(spec: ModelSpec, fused: str, tp: int, rank: int) -> tuple[Block, ...]:
    """Megatron's `linear_qkv`: for every KV group its query heads, then its key head, then its value head."""
    if fused == "gate_up":
        return stacked(spec, fused, tp, rank)
    head, per_group = spec.head_dim, spec.heads // spec.kv_heads
    if tp > spec.kv_heads:
        return stacked(spec, fused, tp, rank)
    first, last = rank_range(spec.kv_heads, tp, rank)
    blocks: list[Block] = []
    for group in range(first, last):
        blocks.append(Block("q", group * per_group * head, (group + 1) * per_group * head))
        blocks += [Block(p, group * head, (group + 1) * head) for p in ("k", "v")]
    return tuple(blocks)


def _replicated(kv_heads: int, tp: int, rank: int) -> tuple[int, int]:
    """The one KV head that a rank repeats when there are more ranks than heads."""
    head = rank * kv_heads // tp
    return head, head + 1
