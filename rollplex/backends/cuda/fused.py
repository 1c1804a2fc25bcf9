"""What lies between a layer's GEMMs and its attention, in one kernel each: rotary embeddings, merging, SwiGLU.

torch's own operators write and read a layer's widest tensors again for every product and sum. Triton comes with torch's
CUDA builds. Arithmetic is float32, rounded once. Where there is no backward, nothing is called that would have one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollplex.ir.errors import EngineError

WIDTH = 1024
"""Elements of a row that one program takes."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [t, heads, d] turned by angles whose cosines and sines are [t, d / 2] float32; both halves alike."""
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _turned(x, cos, sin, 1.0)


def swiglu(both: Tensor) -> Tensor:
    """[.., gate | up] -> silu(gate) * up; keeps what it was given for the backward."""
    return _SwiGLU.apply(both) if torch.is_grad_enabled() else _product(both.contiguous())


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys: outputs [t, heads, d], contiguous, and log-sum-exps, float32.

    Those are [heads, t or more]; what is returned has the second's room, and nothing behind its t rows.
    """
    tokens, heads, d = out.shape
    found, rows = torch.empty_like(out), torch.empty_like(other_lse)
    blocks = {"HEADS": triton.next_power_of_2(heads), "WIDTH": triton.next_power_of_2(d)}
    given = (out, lse, other, other_lse, found, rows, lse.stride(0), other_lse.stride(0), heads, d)
    _launch(_merge, (tokens,), *given, **blocks)
    return found, rows


def check_kernels(device: torch.device) -> None:
    """Launch each once, before a step does: the first launch compiles. EngineError where this machine cannot."""
    try:
        heads, angles = torch.zeros(1, 2, 16, device=device), torch.ones(1, 8, device=device)
        merge(heads, angles[:, :2].t(), heads, angles[:, :2].t())
        swiglu(rotate(heads, angles, angles)).sum().item()
    except (OSError, RuntimeError) as err:
        what = f"Triton cannot make its kernels: {str(err).splitlines()[0]}"
        raise EngineError(what, where=str(device), hint="install a C compiler, or name one in CC") from None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(grad_outputs[0], cos, sin, -1.0), None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        both = both.contiguous()
        ctx.save_for_backward(both)
        return _product(both)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (both,), grad = ctx.saved_tensors, grad_outputs[0].contiguous()
        found = torch.empty_like(both)
        _launch(_gated_backward, _rows(grad), both, grad, found, grad.shape[-1], BLOCK=WIDTH)
        return found


def _product(both: Tensor) -> Tensor:
    """Of contiguous rows."""
    width = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    _launch(_gated, _rows(out), both, out, width, BLOCK=WIDTH)
    return out


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """[t, heads, d] of any strides but the last -> contiguous."""
    x = x if x.stride(2) == 1 else x.contiguous()
    tokens, heads, d = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(d // 2)}
    _launch(_rotate, (tokens,), x, out, cos, sin, x.stride(0), x.stride(1), heads, d // 2, sign, **blocks)
    return out


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: int) -> None:
    """Triton's way to call a kernel, of which its types know nothing; it launches on the thread's current device."""
    with torch.cuda.device(arguments[0].device):
        kernel[grid](*arguments, **constants)


def _rows(out: Tensor) -> tuple[int, int]:
    """A program for each piece of each row."""
    width = out.shape[-1]
    return out.numel() // width, triton.cdiv(width, WIDTH)


@triton.jit
def _rotate(
    x: tl.tensor,
    out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    of_token: tl.tensor,
    of_head: tl.tensor,
    heads: tl.tensor,
    half: tl.tensor,
    sign: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (at < half)
    source = x + token * of_token + head * of_head + at
    first = tl.load(source, mask=inside).to(tl.float32)
    second = tl.load(source + half, mask=inside).to(tl.float32)
    c = tl.load(cos + token * half + at, mask=at < half)
    s = tl.load(sin + token * half + at, mask=at < half) * sign
    target = out + (token * heads + head) * (2 * half) + at
    tl.store(target, first * c - second * s, mask=inside)
    tl.store(target + half, second * c + first * s, mask=inside)


@triton.jit
def _merge(
    out: tl.tensor,
    lse: tl.tensor,
    other: tl.tensor,
    other_lse: tl.tensor,
    found: tl.tensor,
    rows: tl.tensor,
    of_lse: tl.tensor,
    of_other: tl.tensor,
    heads: tl.tensor,
    d: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS)
    first = tl.load(lse + head * of_lse + token, mask=head < heads, other=0.0)
    second = tl.load(other_lse + head * of_other + token, mask=head < heads, other=0.0)
    most = tl.maximum(first, second)
    both = most + tl.log(tl.exp(first - most) + tl.exp(second - most))
    tl.store(rows + head * of_other + token, both, mask=head < heads)
    at = (token * heads + head[:, None]) * d + tl.arange(0, WIDTH)[None, :]
    inside = (head[:, None] < heads) & (tl.arange(0, WIDTH)[None, :] < d)
    own = tl.load(out + at, mask=inside).to(tl.float32) * tl.exp(first - both)[:, None]
    seen = tl.load(other + at, mask=inside).to(tl.float32) * tl.exp(second - both)[:, None]
    tl.store(found + at, own + seen, mask=inside)


@triton.jit
def _gated(both: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(both + row * 2 * width + at, mask=inside).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + at, mask=inside).to(tl.float32)
    tl.store(out + row * width + at, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _gated_backward(both: tl.tensor, grad: tl.tensor, found: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(both + row * 2 * width + at, mask=inside).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + at, mask=inside).to(tl.float32)
    g = tl.load(grad + row * width + at, mask=inside).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = g * up * share * (1 + gate * (1 - share))
    tl.store(found + row * 2 * width + at, of_gate, mask=inside)
    tl.store(found + row * 2 * width + width + at, g * gate * share, mask=inside)
