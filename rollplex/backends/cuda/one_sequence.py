"""Attention of one long sequence over one stretch of keys: cuDNN's kernels on a Hopper GPU, else FlashAttention's.

a prefix               queries [t, heads, d]  x  its own keys [t, kv_heads, d]             causal
a group's responses    queries [t, heads, d]  x  a boundary slot [kv_heads, p of room, d]  no mask: all behind it

The backward has the same bits each time, for which cuDNN's sums apart what each block of keys says; where that is too
much (attention_sums.sums_apart), FlashAttention's goes on from the same output and log-sum-exp.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollplex.backends.attention_sums import room, sums_apart
from rollplex.backends.cuda.graphs import Layout, backward_graph, forward_graph, handle

HOPPER = 9
_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


class Attended(NamedTuple):
    """Output [t, heads, d], and the natural log-sum-exp of each row, float32 [heads, t or more]."""

    out: Tensor
    lse: Tensor

    def rows(self, some: slice) -> Attended:
        """Of some rows, with room for a graph's behind those of the log-sum-exp."""
        if some.stop - some.start == len(self.out):
            return self
        lse = self.lse[:, some]
        return Attended(self.out[some], pad(lse, (0, room(lse.shape[1]) - lse.shape[1])))


def causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """A sequence sees itself: query [t, heads, d], key and value [t, kv_heads, d] -> [t, heads, d], with a backward."""
    if torch.is_grad_enabled():
        return _Causal.apply(query, key, value, scale)
    return attend(query.contiguous(), key.contiguous(), value.contiguous(), scale, slot=False).out


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = attend(q, k, v, scale, slot=False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (
            *attend_backward(grad_outputs[0].contiguous(), q, k, v, Attended(out, lse), ctx.scale, slot=False),
            None,
        )


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, *, slot: bool) -> Attended:
    """Contiguous queries over keys of the same tokens, causal, or over all of a slot; no gradient.

    What lies in a slot behind its keys is read and weighs nothing: it must be finite.
    """
    if not _hopper(query.device):
        return _flashed(query, key, value, scale, slot=slot)
    layout = Layout.of(query, key, scale, slot)
    out = torch.empty_like(query)
    lse = torch.empty(layout.heads, layout.queries, dtype=torch.float32, device=query.device)
    tensors = {"q": query, "k": key, "v": value, "out": out, "lse": lse}
    forward_graph(layout, query.device).run(*_tokens(query, key, slot), tensors)
    return Attended(out, lse)


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, found: Attended, scale: float, *, slot: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `found` may be merged with what the queries saw elsewhere."""
    layout = Layout.of(query, key, scale, slot)
    if not (_hopper(query.device) and sums_apart(layout.heads, layout.queries, layout.keys)):
        return _flashed_backward(grad, query, key, value, found, scale, slot=slot)
    dq = torch.empty_like(query)
    dk, dv = (_like_slot(x, layout.keys) if slot else torch.empty_like(x) for x in (key, value))
    given = {"q": query, "k": key, "v": value, "out": found.out, "lse": found.lse, "grad": grad}
    backward_graph(layout, query.device).run(*_tokens(query, key, slot), given | {"dq": dq, "dk": dk, "dv": dv})
    return dq, dk, dv


def check(device: torch.device) -> None:
    """EngineError where cuDNN's graphs are wanted and cannot be made from Python."""
    if _hopper(device):
        handle(device)


@lru_cache(maxsize=8)
def sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU, as FlashAttention counts them."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=8)
def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == HOPPER


def _like_slot(x: Tensor, room: int) -> Tensor:
    """[kv_heads, p, d] of new memory with the same room."""
    return x.new_empty(x.shape[0], room, x.shape[2])[:, : x.shape[1]]


def _tokens(query: Tensor, key: Tensor, slot: bool) -> tuple[int, int]:
    return query.shape[0], key.shape[1 if slot else 0]


# ---- FlashAttention


def _flashed(query: Tensor, key: Tensor, value: Tensor, scale: float, *, slot: bool) -> Attended:
    if slot:
        key, value = key.transpose(0, 1), value.transpose(0, 1)
    (of_queries, t), (of_keys, p) = _one(query), _one(key)
    out, lse, *_ = _flash(query, key, value, of_queries, of_keys, t, p, 0.0, not slot, False, scale=scale)
    return Attended(out, lse)


def _flashed_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, found: Attended, scale: float, *, slot: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Without dropout its random state is not read."""
    if slot:
        key, value = key.transpose(0, 1), value.transpose(0, 1)
    (of_queries, t), (of_keys, p) = _one(query), _one(key)
    lse, rng = found.lse[:, :t].contiguous(), torch.empty(2, dtype=torch.uint64, device=query.device)
    dq, dk, dv = _flash_backward(
        grad, query, key, value, found.out, lse, of_queries, of_keys, t, p, 0.0, not slot, rng, rng[:0], scale=scale
    )
    return (dq, dk.transpose(0, 1), dv.transpose(0, 1)) if slot else (dq, dk, dv)


def _one(packed: Tensor) -> tuple[Tensor, int]:
    """All of it as one sequence: its bounds, made on the GPU, which nobody waits for; its tokens."""
    t = packed.shape[0]
    return torch.arange(0, 2 * t, t, device=packed.device, dtype=torch.int32), t
