"""Sequence parallelism by heads: `context_parallel` of an fsdp engine, verl's ulysses_sequence_parallel_size.

    outside attention   tokens / sp of a sequence, every head          inside it   every token, heads / sp

Two all-to-alls a layer each way turn one into the other: q, k, v on the way in, the output on the way out. Where sp
exceeds the KV heads, these are repeated first, until there is one for every rank: a rank never has less than one. An
all-to-all makes a new tensor, so the attention output is saved twice: as attention made it and as the projection behind
it reads it. The vision tower runs whole on every rank: a sequence is cut behind it. Jacobs et al. 2023,
arXiv 2309.14509; verl, models/transformers/monkey_patch.py; verl issue 1226.
"""

from __future__ import annotations

from dataclasses import replace

from rollplex.backends import activations as a
from rollplex.ir.work import Work


def saved_bytes(work: Work) -> int:
    """What a layer saves beyond one of whole sequences, a token of a rank: a second output, repeated K and V."""
    s = work.spec
    more = work.swapped_heads - s.heads - 2 * s.kv_heads
    return more * s.head_dim * work.itemsize if work.cp > 1 else 0


def layer_forward_bytes(work: Work, context: int) -> int:
    """Live in one layer's forward, a token of a rank: around attention, q, k, v and output lie there twice."""
    s, whole = work.spec, a.layer_forward_bytes(replace(work, cp=1), context)
    if work.cp == 1:
        return whole
    twice = (2 * s.heads + 2 * s.kv_heads + work.swapped_heads) * s.head_dim * work.itemsize
    return max(whole, 4 * s.hidden * work.itemsize + twice + 2 * a.scores_bytes(work, context))
