"""Exact attention over shared pieces of a prefix and own causal tokens, without copying a piece for each sequence.

queries of n sequences   x  [ piece K, V, one copy ] ..   a part for each piece: no mask
                         x  [ own K, V of the sequence ]  the last part: causal
merged by their log-sum-exp; the backward calls the kernel for each part with the merged output and log-sum-exp,
for some whole sequences at a time (attention_sums.py). Those are the kernels of a host; a GPU has others
(cuda/attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from rollplex.backends.attention_sums import runs
from rollplex.backends.cuda import attention as gpu
from rollplex.backends.in_runs import Gradients, in_runs

Piece = tuple[Tensor, Tensor]
"""Keys and values [kv_heads, p, d] of one piece of a boundary in one layer."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class LayerIO(Protocol):
    """What a language layer's attention does with its rotated heads."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [n, heads, s, d], key and value [n, kv_heads, s, d] -> output [n, heads, s, d]."""
        ...


def causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal grouped-query attention; keys and values are kept unexpanded for the backward."""
    if query.is_cuda:
        n, _, s, _ = query.shape
        lengths = gpu.Lengths.of([s] * n, query.device)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out = gpu.packed(q, k, v, lengths, scale, causal=True)
        return out.unflatten(0, (n, s)).transpose(1, 2)
    return _SharedPrefix.apply(query, key, value, scale)


def causal_after(query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[Piece], scale: float) -> Tensor:
    """n sequences of s tokens [n, heads, s, d] that all continue the same pieces, keys and values [kv_heads, p, d]."""
    if not pieces:
        return causal(query, key, value, scale)
    if query.is_cuda:
        ((piece_key, piece_value),) = pieces  # a plan with turns is refused there
        n, _, s, _ = query.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        lengths = gpu.Lengths.of([s] * n, query.device)
        out = gpu.packed_after_prefix(q, k, v, lengths, piece_key, piece_value, scale)
        return out.unflatten(0, (n, s)).transpose(1, 2)
    return _SharedPrefix.apply(query, key, value, scale, *chain.from_iterable(pieces))


def by_layer(pieces: Sequence[Tensor]) -> list[list[Piece]]:
    """The pieces [layers, 2, kv_heads, p, d] of a boundary as each layer reads them.

    Unbound once: indexing a piece layer by layer would make a full-size gradient for each layer.
    """
    unbound = [[(k, v) for k, v in (layer.unbind(0) for layer in piece.unbind(0))] for piece in pieces]
    return [list(layer) for layer in zip(*unbound, strict=True)]


def attend_prefix(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every query sees every key, no gradient: [b, kv_heads, m, d] -> output and log-sum-exp [b, kv_heads, m]."""
    if query.is_cuda:
        every = torch.full((len(key),), key.shape[2], device=query.device)
        return attend_filled(query, key, value, every, scale)
    return _flash(query, key, value, 0.0, False, scale=scale)


def attend_filled(query: Tensor, key: Tensor, value: Tensor, filled: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `attend_prefix`, but sequence i has only its first `filled[i]` keys: what lies behind is not even read."""
    wide = torch.promote_types(query.dtype, torch.float32)
    empty = torch.arange(key.shape[2], device=key.device) >= filled.to(key.device)[:, None]
    scores = (query.to(wide) @ key.to(wide).transpose(-1, -2)) * scale
    scores = scores.masked_fill(empty[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return (weights @ value.to(wide).masked_fill(empty[:, None, :, None], 0)).to(query.dtype), lse


class _SharedPrefix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, *pieces: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        out, lse = _flash(q, expand(k, groups), expand(v, groups), 0.0, True, scale=scale)
        for piece_k, piece_v in zip(pieces[::2], pieces[1::2], strict=True):
            packed = pack(q, k.shape[1])
            out_a, lse_a = _flash(packed, piece_k[None], piece_v[None], 0.0, False, scale=scale)
            out, lse = merge(out, lse, unpack(out_a, q), unpack(lse_a[..., None], q)[..., 0])
        ctx.save_for_backward(q, k, v, out, lse, *pieces)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        q, k, v, out, lse, *pieces = ctx.saved_tensors
        n, heads, s, _ = q.shape
        # A host's kernel sums nothing apart: runs are those of a GPU of one SM, and few groups are too large for one.
        own, seeing = ([(r, r) for r in runs([s] * n, heads, sms=1, as_one=one)] for one in (False, True))
        of_themselves = partial(_of_themselves, (grad, q, k, v, out, lse), ctx.scale)
        dq, dk, dv = in_runs(own, of_themselves, (q, k, v), ())
        found: list[Tensor] = []
        for piece in zip(pieces[::2], pieces[1::2], strict=True):
            of_piece = partial(_of_piece, (grad, q, out, lse), piece, ctx.scale)
            dq_a, *of_keys = in_runs(seeing, of_piece, (q,), piece)
            dq, found = dq + dq_a, [*found, *of_keys]
        return dq, dk, dv, None, *found


def _of_themselves(given: Sequence[Tensor], scale: float, _: slice, rows: slice) -> Gradients:
    """Of queries, keys and values, by what some sequences see of themselves."""
    grad, q, k, v, out, lse = (x[rows] for x in given)
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    dq, dk, dv = _flash_backward(grad, q, expand(k, groups), expand(v, groups), out, lse, 0.0, True, scale=scale)
    return dq, *(d.unflatten(1, (kv_heads, groups)).sum(2) for d in (dk, dv))


def _of_piece(given: Sequence[Tensor], piece: Piece, scale: float, _: slice, rows: slice) -> Gradients:
    """Of queries, and of a piece's keys and values, by what some sequences see of it."""
    grad, q, out, lse = (x[rows] for x in given)
    packed, packed_q, packed_out, packed_lse = (pack(x, len(piece[0])) for x in (grad, q, out, lse[..., None]))
    dq, dk, dv = _flash_backward(
        packed, packed_q, *(x[None] for x in piece), packed_out, packed_lse[..., 0], 0.0, False, scale=scale
    )
    return unpack(dq, q), dk[0], dv[0]


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over two disjoint sets of keys from the softmax over each: outputs [.., d], log-sum-exps [..]."""
    both = torch.logaddexp(lse, other_lse)
    return out * (lse - both).exp()[..., None] + other * (other_lse - both).exp()[..., None], both


def expand(kv: Tensor, groups: int) -> Tensor:
    """[n, kv_heads, s, d] -> [n, kv_heads * groups, s, d]."""
    return kv if groups == 1 else kv.repeat_interleave(groups, dim=1)


def pack(x: Tensor, kv_heads: int) -> Tensor:
    """[n, heads, s, d] -> [1, kv_heads, n * groups * s, d]: all queries of one KV head as one sequence."""
    return x.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 3)[None]


def unpack(packed: Tensor, like: Tensor) -> Tensor:
    """The inverse of `pack` for a query shaped like `like` (its last dim may differ)."""
    n, heads, s, _ = like.shape
    kv_heads = packed.shape[1]
    return packed[0].reshape(kv_heads, n, heads // kv_heads, s, -1).transpose(0, 1).flatten(1, 2)
