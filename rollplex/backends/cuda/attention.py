"""Attention of packed sequences on a GPU: no padding, no mask, one kernel call a part.

    queries of n responses, end to end   x  [ prefix K, V, one copy ]        part A: no mask
                                         x  [ each response's own K, V ]     part B: causal, variable lengths
    merged by their log-sum-exp; the backward calls the kernel for each part with the merged output and log-sum-exp,
for as many whole responses at a time as may sum apart what they do (attention_sums.py).

Many sequences are FlashAttention's, one long one (part A, a whole prompt) is one_sequence.py's. Keys and values have as
many heads as the model has KV heads: kernels group queries by themselves. Of bfloat16 and float16 only, as the kernels
are. On a host the same is done by training/attention.py, sequences side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollplex.backends.attention_sums import runs
from rollplex.backends.cuda import one_sequence
from rollplex.backends.cuda.one_sequence import Attended
from rollplex.backends.in_runs import Gradients, in_runs

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class Lengths(NamedTuple):
    """Sequences end to end: where each starts and where the last ends [n + 1] int32 on the GPU; the length of each."""

    bounds: Tensor
    each: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return max(self.each)

    def cut(self, runs: Sequence[slice]) -> list[tuple[slice, slice]]:
        """Runs of sequences, and where their tokens lie."""
        ends = [0, *accumulate(self.each)]
        return [(run, slice(ends[run.start], ends[run.stop])) for run in runs]

    def of_run(self, run: slice) -> Tensor:
        """The bounds of some sequences by themselves, counted on the GPU, which nobody waits for."""
        some = self.bounds[run.start : run.stop + 1]
        return some if run.start == 0 else some - some[0]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Lengths:
        """Of sequences that have these lengths. Every layer asks again, and a copy to a GPU waits for all before it."""
        return _of(tuple(lengths), device)


@lru_cache(maxsize=32)
def _of(lengths: tuple[int, ...], device: torch.device) -> Lengths:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    return Lengths(ends, lengths)


def packed(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scale: float, causal: bool) -> Tensor:
    """Each sequence sees itself: query [t, heads, d], key and value [t, kv_heads, d] -> [t, heads, d].

    Windows of a vision tower, frames, or whole prompts; autograd knows the kernel's backward.
    """
    if causal and len(lengths.bounds) == 2:
        return one_sequence.causal(query, key, value, scale)
    return _attend(query, key, value, lengths, lengths, scale, causal)[0]


def packed_after_prefix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
    prefix_key: Tensor,
    prefix_value: Tensor,
    scale: float,
) -> Tensor:
    """Each sequence sees one prefix [kv_heads, p, d], and itself up to its own position."""
    if torch.is_grad_enabled():
        return _AfterPrefix.apply(query, key, value, prefix_key, prefix_value, lengths, scale)
    return _after_prefix(query.contiguous(), key, value, prefix_key, prefix_value, lengths, scale)[0]


class _AfterPrefix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix_k: Tensor,
        prefix_v: Tensor,
        lengths: Lengths,
        scale: float,
    ) -> Tensor:
        q = q.contiguous()
        out, lse, *rng = _after_prefix(q, k, v, prefix_k, prefix_v, lengths, scale)
        ctx.save_for_backward(q, k, v, prefix_k, prefix_v, out, lse, *rng)
        ctx.lengths, ctx.scale = lengths, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, prefix_k, prefix_v, out, lse, *rng = ctx.saved_tensors
        grad, lengths, scale = grad_outputs[0].contiguous(), ctx.lengths, ctx.scale
        found, heads, sms = Attended(out, lse), q.shape[1], one_sequence.sms(q.device)

        def of_themselves(run: slice, rows: slice) -> Gradients:
            bounds, longest = lengths.of_run(run), max(lengths.each[run])
            given = (*(x[rows] for x in (grad, q, k, v, out)), lse[:, rows].contiguous())
            return _backward(*given, bounds, bounds, longest, longest, 0.0, True, *rng, scale=scale)

        def of_prefix(_: slice, rows: slice) -> Gradients:
            return one_sequence.attend_backward(
                grad[rows], q[rows], prefix_k, prefix_v, found.rows(rows), scale, slot=True
            )

        own, seeing = (lengths.cut(runs(lengths.each, heads, sms, as_one=one)) for one in (False, True))
        dq, dk, dv = in_runs(own, of_themselves, (q, k, v), ())
        dq_a, dk_a, dv_a = in_runs(seeing, of_prefix, (q,), (prefix_k, prefix_v))
        return dq + dq_a, dk, dv, dk_a, dv_a, None, None


def _after_prefix(
    q: Tensor, k: Tensor, v: Tensor, prefix_k: Tensor, prefix_v: Tensor, lengths: Lengths, scale: float
) -> tuple[Tensor, ...]:
    """Both parts merged, and what the backward wants of the kernel."""
    out, lse, *rng = _attend(q, k, v, lengths, lengths, scale, True)
    return *_merge(out, lse, one_sequence.attend(q, prefix_k, prefix_v, scale, slot=True)), *rng


def _attend(
    query: Tensor, key: Tensor, value: Tensor, of_queries: Lengths, of_keys: Lengths, scale: float, causal: bool
) -> tuple[Tensor, ...]:
    """Output [t, heads, d], log-sum-exp [heads, t], and what the backward wants of a kernel without dropout."""
    out, lse, first, second, _ = _forward(
        query, key, value, of_queries.bounds, of_keys.bounds, of_queries.longest, of_keys.longest, 0.0, causal, False,
        scale=scale,
    )  # fmt: skip
    return out, lse, first, second


def _merge(out: Tensor, lse: Tensor, other: Attended) -> tuple[Tensor, Tensor]:
    """Softmax over two disjoint sets of keys."""
    from rollplex.backends.cuda.fused import merge  # Triton is there where a GPU is

    return merge(out, lse, other.out, other.lse)
