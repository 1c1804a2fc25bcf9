"""Tensor maths of ours that torch has no word for: what a traced algorithm records and what a worker executes.

advantage = rx.group_normalize(score, n)                       [prompt, group]
advantage = rx.gae(rewards, values, rollout.mask)              [prompt, group, response]
loss      = rx.masked_mean(x, rollout.mask)                    []

Called with traced values a function records itself; called with tensors it computes. Their rows are in ops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def group_normalize(x: Any, n: int, eps: float = 1e-6) -> Any:
    """Normalise over the n responses of every prompt: (x - mean) / (std + eps), std with n - 1 (GRPO's advantage).

    Before and after: [prompt, group, ..]. Source: DeepSeekMath, arXiv 2402.03300, section 4.1.
    """
    if has_torch_function((x,)):
        return handle_torch_function(group_normalize, (x,), x, n, eps=eps)
    assert tuple(x.shape[1:2]) == (n,), f"group_normalize over {n} responses of a tensor {tuple(x.shape)}"
    return (x - x.mean(dim=1, keepdim=True)) / (x.std(dim=1, keepdim=True) + eps)


def masked_sum(x: Any, mask: Any) -> Any:
    """Sum of x where the mask holds. Before: two tensors of one shape. After: a scalar []."""
    if has_torch_function((x, mask)):
        return handle_torch_function(masked_sum, (x, mask), x, mask)
    # `where` rather than a product: a padded position may hold inf or nan, and 0 * inf is nan.
    return torch.where(mask, x, 0).sum() if mask.dtype is torch.bool else (x * mask).sum()


def masked_mean(x: Any, mask: Any) -> Any:
    """Mean of x where the mask holds, over all prompts and responses of the step: one token, one vote.

    Before: two tensors of one shape, of the whole step. After: a scalar []: masked_sum(x, mask) / mask_count(mask).
    """
    if has_torch_function((x, mask)):
        return handle_torch_function(masked_mean, (x, mask), x, mask)
    x, mask = torch.broadcast_tensors(x, mask)
    return portion(masked_sum(x, mask), mask_count(mask))


def trajectory_mean(values: Sequence[Any], masks: Sequence[Any]) -> Any:
    """Mean over the response tokens of all turns: one token, one vote, over whole trajectories.

    Written in other ops. Before: a tensor and a mask of every turn, each pair of one shape. After: a scalar [].
    """
    sums, counts = [masked_sum(x, m) for x, m in zip(values, masks, strict=True)], [m.sum() for m in masks]
    return reduce(add, sums) / reduce(add, counts).clamp(min=1)


def mask_count(mask: Tensor) -> Tensor:
    """How much a mask lets through, at least 1: the divisor of a masked mean. Before: [..]. After: a scalar []."""
    total = mask.sum()
    return torch.where(total == 0, torch.ones_like(total), total)


def rows(x: Tensor) -> Tensor:
    """The number of prompts of a tensor [prompt, ..] of the whole step. After: a scalar []."""
    return torch.tensor(x.shape[0])


def portion(x: Any, count: Tensor) -> Any:
    """x divided by a count, in x's own dtype: what one prompt group contributes to a mean. Before and after: [..]."""
    return x / count.to(x.dtype) if isinstance(x, Tensor) else x / count.item()


# ---------------------------------------------------------------------------------------------- along the response


def sequence_sum(x: Any, mask: Any) -> Any:
    """Sum over the response tokens of every response: log pi(y|x) of token log-probabilities.

    Before: two tensors [prompt, group, response]. After: [prompt, group].
    """
    if has_torch_function((x, mask)):
        return handle_torch_function(sequence_sum, (x, mask), x, mask)
    return torch.where(mask, x, 0).sum(-1)


def sequence_mean(x: Any, mask: Any) -> Any:
    """Mean over the response tokens of every response: one response, one vote, whatever its length.

    Before: two tensors [prompt, group, response]. After: [prompt, group]; 0 for a response without tokens.
    """
    if has_torch_function((x, mask)):
        return handle_torch_function(sequence_mean, (x, mask), x, mask)
    return torch.where(mask, x, 0).sum(-1) / mask.sum(-1).clamp(min=1)


def at_end(x: Any, mask: Any) -> Any:
    """A number of every response, put on its last token: where a score becomes a reward. Zero elsewhere.

    Before: x [prompt, group], mask [prompt, group, response]. After: [prompt, group, response].
    """
    if has_torch_function((x, mask)):
        return handle_torch_function(at_end, (x, mask), x, mask)
    wide = x if x.dim() == mask.dim() else x[..., None]
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.where(last, wide, 0)


def gae(rewards: Any, values: Any, mask: Any, gamma: float = 1.0, lam: float = 0.95) -> Any:
    """Generalised advantage estimates, a constant of the loss: no gradient flows into rewards or values.

        delta_t = r_t + gamma V_t+1 - V_t        A_t = delta_t + gamma lam A_t+1        (V and A are 0 behind the end)

    Before: rewards [prompt, group, response], or scores [prompt, group], which count on the last token; values and mask
    [prompt, group, response]. After: [prompt, group, response], 0 where the mask does not hold; masked positions inside
    a response are passed over. Source: Schulman et al., arXiv 1506.02438, equation 16.
    """
    if has_torch_function((rewards, values, mask)):
        return handle_torch_function(gae, (rewards, values, mask), rewards, values, mask, gamma=gamma, lam=lam)
    values, rewards = values.detach(), rewards.detach()
    if rewards.shape != values.shape:
        rewards = at_end(rewards, mask)
    following = advantage = torch.zeros_like(values[..., 0])
    found = []
    for t in reversed(range(values.shape[-1])):
        here, value = mask[..., t], values[..., t]
        delta = rewards[..., t] + gamma * following - value
        advantage = torch.where(here, delta + gamma * lam * advantage, advantage)
        following = torch.where(here, value, following)
        found.append(torch.where(here, advantage, 0))
    return torch.stack(found[::-1], dim=-1)


def whiten(x: Any, mask: Any, eps: float = 1e-8) -> Any:
    """(x - mean) / sqrt(variance + eps) over all response tokens of the step; x must not depend on the trained forward.

    Written in other ops: mean and variance are `wide` values of the loss, found once from the prompts of all ranks.
    Before and after: [prompt, group, response].
    """
    centred = x - masked_mean(x, mask)
    return centred * torch.rsqrt(masked_mean(centred * centred, mask) + eps)
