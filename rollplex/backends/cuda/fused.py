"""What lies behind a layer's attention and between its GEMMs, in one kernel each: merging, SwiGLU.

torch's own operators write and read a layer's widest tensors again for every product and sum. Triton comes with torch's
CUDA builds. Arithmetic is float32, rounded once. Where there is no backward, nothing is called that would have one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollplex.backends.cuda.heads import heads as apart
from rollplex.backends.cuda.launch import block, launch
from rollplex.ir.errors import EngineError

WIDTH = 1024
"""Elements of a row that one program takes."""


def swiglu(both: Tensor) -> Tensor:
    """[.., gate | up] -> silu(gate) * up; keeps what it was given for the backward."""
    return _SwiGLU.apply(both) if torch.is_grad_enabled() else _product(both.contiguous())


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys: outputs [t, heads, d], contiguous, and log-sum-exps, float32.

    Those are [heads, t or more]; what is returned has the second's room, and nothing behind its t rows.
    """
    tokens, heads, d = out.shape
    found, rows = torch.empty_like(out), torch.empty_like(other_lse)
    blocks = {"HEADS": block(heads), "WIDTH": block(d)}
    given = (out, lse, other, other_lse, found, rows, lse.stride(0), other_lse.stride(0), heads, d)
    launch(_merge, (tokens,), *given, **blocks)
    return found, rows


def check_kernels(device: torch.device) -> None:
    """Launch each once, before a step does: the first launch compiles. EngineError where this machine cannot."""
    try:
        row, angles = torch.zeros(1, 64, device=device), torch.ones(1, 8, device=device)
        heads, *_ = apart(row, angles, angles, (1, 2, 1))
        merge(heads, angles[:, :2].t(), heads, angles[:, :2].t())
        swiglu(heads).sum().item()
    except (OSError, RuntimeError) as err:
        what = f"Triton cannot make its kernels: {str(err).splitlines()[0]}"
        raise EngineError(what, where=str(device), hint="install a C compiler, or name one in CC") from None


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
        launch(_gated_backward, _rows(grad), both, grad, found, grad.shape[-1], BLOCK=WIDTH)
        return found


def _product(both: Tensor) -> Tensor:
    """Of contiguous rows."""
    width = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    launch(_gated, _rows(out), both, out, width, BLOCK=WIDTH)
    return out


def _rows(out: Tensor) -> tuple[int, int]:
    """A program for each piece of each row."""
    width = out.shape[-1]
    return out.numel() // width, triton.cdiv(width, WIDTH)


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
