"""Log-probabilities from logits that lie cut over a group, against torch's log_softmax over the whole row.

rank 0   l0 l1 l2 l3     rank 1   l4 l5 p p     rank 2   p p p p        p: padding of the vocabulary
"""

from __future__ import annotations

import pytest
import torch
from megatron_tiny import group_here
from processes import ranks
from torch import Tensor

from rollplex.backends.megatron.groups import Alone
from rollplex.backends.megatron.head import token_logprobs

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("megatron")]

ROWS = 5


def whole(vocab: int, padded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, tokens and the gradient of their log-probabilities."""
    rng = torch.Generator().manual_seed(vocab)
    logits = 30 * torch.randn(ROWS, padded, generator=rng, dtype=torch.float64)
    tokens = torch.tensor([0, vocab - 1, vocab // 2, vocab // 2, 1])
    return logits.to(dtype), tokens, torch.randn(ROWS, generator=rng, dtype=torch.float64)


def share(vocab: int, padded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-probabilities and the gradient of this rank's logits."""
    group = group_here() or Alone()
    logits, tokens, grad = whole(vocab, padded, dtype)
    own = logits.chunk(group.size(), 1)[group.rank()].clone().requires_grad_()
    found = token_logprobs(own, tokens, 0.7, vocab, group)
    found.backward(grad.to(found.dtype))
    assert own.grad is not None
    return found.detach(), own.grad


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("vocab", "padded"), [(8, 8), (6, 12), (11, 12)])
def test_as_log_softmax_of_the_whole_row(vocab: int, padded: int, tp: int) -> None:
    """With 6 of 12 columns real the second rank has none; large logits stay finite; padding has no gradient."""
    logits, tokens, grad = whole(vocab, padded, torch.float64)
    logits = logits[:, :vocab].clone().requires_grad_()
    wanted = (logits / 0.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    wanted.backward(grad)
    task = (vocab, padded, torch.float64)
    shares = [share(*task)] if tp == 1 else ranks(tp).run(share, *task)
    gradient = torch.cat([g for _, g in shares], dim=1)
    assert logits.grad is not None
    assert max((found - wanted).abs().max().item() for found, _ in shares) <= 1e-12
    assert (gradient[:, :vocab] - logits.grad).abs().max() <= 1e-12
    assert gradient[:, vocab:].abs().sum() == 0


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    """Sixteen bits hold no probability near 1."""
    logits, tokens, _ = whole(8, 8, torch.bfloat16)
    found, _ = share(8, 8, torch.bfloat16)
    wanted = (logits.float() / 0.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() <= 1e-5
