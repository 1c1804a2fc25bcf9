"""SwiGLU between the two linears of a gated MLP; autograd keeps what the first one gave, and nothing made of it.

stock    gate | up, silu(gate), up + offset, product      5 F a token
here     gate | up, product                               3 F; silu(gate) is made again in the backward

Megatron builds it in the place that is meant for TransformerEngine's (`use_te_activation_func`), which takes both
halves as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class SwiGLU(nn.Module):
    """[.., gate | up] -> silu(gate) * up."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, both: Tensor) -> Tensor:
        if both.is_cuda:
            from rollplex.backends.cuda.fused import swiglu  # Triton is there where a GPU is

            return swiglu(both)
        return _SwiGLU.apply(both)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (grad,) = grad_outputs
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * silu(gate)], dim=-1)
