"""What lies between a fused QKV projection and attention, in one kernel: rotary embeddings, and heads laid end to end.

a row      groups of [queries | keys | values], heads of d elements each
  language   8 | 1 | 1   8 | 1 | 1              two KV heads of eight queries each
  tower      16 | 16 | 16                       one group
gives      queries [t, 16, d] and keys, turned; values, copied: what is saved of them is not all of the projection
backward   gradients of all three turned back, into one gradient of the row

torch's operators would copy queries and values first, and put gradients together in the end. Arithmetic is float32,
rounded once. Where there is no backward, nothing is called that would have one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollplex.backends.cuda.launch import block, launch

Heads = tuple[Tensor, Tensor, Tensor]
Row = tuple[int, int, int]
"""Groups of a row, heads of queries in each, and of keys, of which there are as many of values."""


def heads(mixed: Tensor, cos: Tensor, sin: Tensor, row: Row) -> Heads:
    """Rows [t, .., width] -> queries and keys, turned, and values [t, .., heads, d], contiguous.

    Angles are given as cosines and sines [t, d / 2], float32, contiguous; both halves of a head are turned alike.
    """
    return _Heads.apply(mixed, cos, sin, row) if torch.is_grad_enabled() else _apart(mixed, cos, sin, row)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, cos: Tensor, sin: Tensor, row: Row) -> Heads:
        ctx.save_for_backward(cos, sin)
        ctx.row = row
        return _apart(mixed, cos, sin, row)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _together(grad_outputs, cos, sin, ctx.row), None, None, None


def _apart(mixed: Tensor, cos: Tensor, sin: Tensor, row: Row) -> Heads:
    (groups, queries, keys), half, lead = row, cos.shape[1], mixed.shape[:-1]
    mixed = mixed.contiguous()
    query = mixed.new_empty(*lead, groups * queries, 2 * half)
    key, value = (mixed.new_empty(*lead, groups * keys, 2 * half) for _ in range(2))
    launch(_split, (len(cos), groups), mixed, query, key, value, cos, sin, **_sizes(row, half))
    return query, key, value


def _together(grads: tuple[Tensor, ...], cos: Tensor, sin: Tensor, row: Row) -> Tensor:
    """Gradients [t, .., heads, d] of any strides but the last: those of a boundary lie head by head."""
    (groups, queries, keys), half, lead = row, cos.shape[1], grads[0].shape[:-2]
    grads = tuple(g if g.stride(-1) == 1 else g.contiguous() for g in grads)
    strides = [n for g in grads for n in (g.stride(0), g.stride(-2))]
    found = grads[0].new_empty(*lead, groups * (queries + 2 * keys) * 2 * half)
    launch(_join, (len(cos), groups), found, *grads, cos, sin, *strides, **_sizes(row, half))
    return found


@lru_cache(maxsize=8)
def _sizes(row: Row, half: int) -> dict[str, int]:
    """A kernel's constants; every layer asks again."""
    _, queries, keys = row
    return {"QUERIES": queries, "KEYS": keys, "HALF": half, "HEADS": block(queries + 2 * keys), "WIDTH": block(half)}


@triton.jit
def _turned(first: tl.tensor, second: tl.tensor, c: tl.tensor, s: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return first * c - second * s, second * c + first * s


@triton.jit
def _split(
    mixed: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    group = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < QUERIES + 2 * KEYS) & (at < HALF)
    source = mixed + (group * (QUERIES + 2 * KEYS) + head) * (2 * HALF) + at
    first = tl.load(source, mask=inside).to(tl.float32)
    second = tl.load(source + HALF, mask=inside).to(tl.float32)
    angle = tl.program_id(0).to(tl.int64) * HALF + at
    c, s = tl.load(cos + angle, mask=at < HALF), tl.load(sin + angle, mask=at < HALF)
    left, right = _turned(first, second, c, s)
    of_query, of_key = inside & (head < QUERIES), inside & (head >= QUERIES) & (head < QUERIES + KEYS)
    to_query = query + (group * QUERIES + head) * (2 * HALF) + at
    tl.store(to_query, left, mask=of_query)
    tl.store(to_query + HALF, right, mask=of_query)
    to_key = key + (group * KEYS + head - QUERIES) * (2 * HALF) + at
    tl.store(to_key, left, mask=of_key)
    tl.store(to_key + HALF, right, mask=of_key)
    of_value = inside & (head >= QUERIES + KEYS)
    to_value = value + (group * KEYS + head - QUERIES - KEYS) * (2 * HALF) + at
    tl.store(to_value, first, mask=of_value)
    tl.store(to_value + HALF, second, mask=of_value)


@triton.jit
def _join(
    found: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_token: tl.tensor,
    query_head: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < QUERIES + 2 * KEYS) & (at < HALF)
    of_query, of_value = inside & (head < QUERIES), inside & (head >= QUERIES + KEYS)
    of_key = inside & (head >= QUERIES) & (head < QUERIES + KEYS)
    from_query = query + token * query_token + (group * QUERIES + head) * query_head + at
    from_key = key + token * key_token + (group * KEYS + head - QUERIES) * key_head + at
    from_value = value + token * value_token + (group * KEYS + head - QUERIES - KEYS) * value_head + at
    first = _one_of(from_query, of_query, from_key, of_key)
    second = _one_of(from_query + HALF, of_query, from_key + HALF, of_key)
    angle = token * HALF + at
    c, s = tl.load(cos + angle, mask=at < HALF), tl.load(sin + angle, mask=at < HALF)
    left, right = _turned(first, second, c, -s)
    target = found + ((token * tl.num_programs(1) + group) * (QUERIES + 2 * KEYS) + head) * (2 * HALF) + at
    turned = of_query | of_key
    tl.store(target, left, mask=turned)
    tl.store(target + HALF, right, mask=turned)
    tl.store(target, tl.load(from_value, mask=of_value), mask=of_value)
    tl.store(target + HALF, tl.load(from_value + HALF, mask=of_value), mask=of_value)


@triton.jit
def _one_of(source: tl.tensor, mask: tl.tensor, other: tl.tensor, of_other: tl.tensor) -> tl.tensor:
    return tl.where(mask, tl.load(source, mask=mask).to(tl.float32), tl.load(other, mask=of_other).to(tl.float32))
