"""Log-probabilities of tokens from logits that lie cut over a group: three numbers a token travel, never a logit row.

peak = max over ranks of max(logits)      total = sum over ranks of sum(exp(logits - peak))
log p = logit[token] - peak - log(total)       d logits of a rank = (own one-hot - softmax) d log p
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollplex.backends.megatron.groups import Group, all_reduce


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float, vocab: int, group: Group) -> Tensor:
    """log p(token) [m] under softmax(logits / temperature), the same on every rank; at least float32.

    `logits` [m, rows] are this rank's columns; those behind `vocab`, its padding, have no probability.
    """
    first = group.rank() * logits.shape[1]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return _TokenLogprobs.apply(wide / temperature, tokens - first, vocab - first, group)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, real: int, group: Group) -> Tensor:
        if real < logits.shape[1]:
            logits = logits.clone()
            logits[:, max(real, 0) :] = float("-inf")
        own = (tokens >= 0) & (tokens < logits.shape[1])
        column = torch.where(own, tokens, 0)[:, None]
        peak = all_reduce(logits.amax(-1), group, dist.ReduceOp.MAX)
        scale = (logits - peak[:, None]).exp_()
        found = torch.where(own, logits.gather(-1, column)[:, 0], 0)
        total, found = all_reduce(torch.stack([scale.sum(-1), found]), group)
        ctx.save_for_backward(scale.div_(total[:, None]), own, column)
        return found - peak - total.log()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grad_outputs
        softmax, own, column = ctx.saved_tensors
        d_logits = softmax * -grad[:, None]
        d_logits.scatter_add_(-1, column, (grad * own)[:, None])
        return d_logits, None, None, None
