"""Products in the shapes that a GPU is fast at: rows that begin at a multiple of 16 bytes, gate and up as one matrix.

[t, 3420] x [3420, 1280]                      cuBLAS takes kernels of older GPUs: rows of 6840 bytes
[t, 3420 | 4 zeros] x [3420 | 4, 1280]        the same numbers, those of this GPU           3 B and 7 B have such towers
[t, 1280] x [gate | up], 6840 columns         one product, and nothing to join behind it

What autograd keeps is what it keeps of the plain products: inputs and parameters, not the padded or joined copies,
for which a plan has room while they are read (row_bytes).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollplex.backends.row_bytes import missing


def odd(rows: Tensor) -> bool:
    """Whether these rows [.., n], on a GPU, begin where its fast kernels do not."""
    return odd_width(rows, rows.shape[-1])


def odd_width(like: Tensor, width: int) -> bool:
    """Whether rows of so many elements would."""
    return like.is_cuda and missing(width, like.element_size()) > 0


def padded(rows: Tensor, weight: Tensor) -> Tensor:
    """F.linear(rows, weight) of rows [.., n] and weight [m, n] with zeros behind the n columns of both."""
    return _Padded.apply(rows, weight) if torch.is_grad_enabled() else F.linear(_wider(rows), _wider(weight))


def joined(hidden: Tensor, gate: nn.Linear, up: nn.Linear) -> Tensor:
    """[gate(hidden) | up(hidden)], [.., 2 n], of one product."""
    given = (hidden, gate.weight, up.weight, gate.bias, up.bias)
    return _Joined.apply(*given) if torch.is_grad_enabled() else F.linear(hidden, *_both(*given[1:]))


class _Padded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return F.linear(_wider(rows), _wider(weight))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight), (grad,), n = ctx.saved_tensors, grad_outputs, ctx.saved_tensors[1].shape[1]
        of_rows, of_weight = ctx.needs_input_grad
        return (
            (grad @ _wider(weight))[..., :n] if of_rows else None,
            (_flat(grad).t() @ _flat(_wider(rows)))[:, :n] if of_weight else None,
        )


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, gate: Tensor, up: Tensor, of_gate: Tensor | None, of_up: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(hidden, gate, up)
        return F.linear(hidden, *_both(gate, up, of_gate, of_up))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, gate, up), (grad,), n = ctx.saved_tensors, grad_outputs, ctx.saved_tensors[1].shape[0]
        of_hidden, of_weights, _, of_biases, _ = ctx.needs_input_grad
        weights = (_flat(grad).t() @ _flat(hidden)).split(n) if of_weights else (None, None)
        biases = _flat(grad).sum(0).split(n) if of_biases else (None, None)
        return (grad @ torch.cat([gate, up]) if of_hidden else None, *weights, *biases)


def _both(gate: Tensor, up: Tensor, of_gate: Tensor | None, of_up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """One weight and one bias."""
    bias = None if of_gate is None or of_up is None else torch.cat([of_gate, of_up])
    return torch.cat([gate, up]), bias


def _wider(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, missing(rows.shape[-1], rows.element_size())))


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(-1, rows.shape[-1])
