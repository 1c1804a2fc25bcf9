"""Gradients and log-probabilities of the Megatron model equal one full-sequence pass of plain transformers.

TP 1   this process                     prompt   v v v v t t t | t          prefix, once | suffix of n responses
TP 2   two processes, gloo                                     | r r r
                                                               | r r r r r
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_tiny import (
    CONFIG,
    grpo_loss,
    oracle_model,
    responses_of,
    text_prompt,
    tied,
    video_prompt,
    whole_gradients,
    whole_logprobs,
)
from megatron_tiny import CASE_2, TEMPERATURE, Case, Groups, Step, step
from processes import ranks
from torch import Tensor

from rollplex.backends.hf.precision import KeepDouble

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("megatron")]

CASES = {
    "saved in hbm": Case(),
    "everything recomputed, saved on the host, [I, O], gate and up apart, in parts": Case(
        CASE_2, "host", "full", recompute=True, size=3
    ),
    "dropped, one response at a time": Case(where="dropped", size=1),
    "frozen tower": Case(frozen=("vision",)),
    "stretches of the tokens": Case(sequence=True),
    "stretches, everything recomputed, [I, O], gate and up apart, in parts": Case(
        CASE_2, "host", "full", recompute=True, size=3, sequence=True
    ),
}
ODD = {**CONFIG, "text_config": {**CONFIG["text_config"], "vocab_size": 70}}  # 128 rows with padding


def run(tp: int, config: dict[str, Any], dtype: torch.dtype, groups: Groups, case: Case) -> list[Step]:
    """A step by rank."""
    weights = {n: p.detach() for n, p in oracle_model(config, dtype).named_parameters()}
    if tp == 1:
        return [step(config, weights, dtype, groups, case)]
    return ranks(tp).run(step, config, weights, dtype, groups, case)


def two_groups(model: Any) -> Groups:
    """Two videos, responses of different lengths."""
    return [
        (video_prompt(model), responses_of([3, 7, 1, 5])),
        (video_prompt(model, grid=(3, 4, 4), text=3, seed=8), responses_of([6, 2], seed=9)),
    ]


def worst(found: dict[str, Tensor] | None, wanted: dict[str, Tensor]) -> float:
    assert found is not None
    assert found.keys() == wanted.keys()
    return max((found[n] - wanted[n]).abs().max().item() for n in wanted)


def worst_logprob(oracle: Any, groups: Groups, found: list[Tensor]) -> float:
    """Against one call a response, without a gradient."""
    with torch.no_grad(), KeepDouble():
        return max(
            (logp[i, : len(r)] - whole_logprobs(oracle, prompt, r, TEMPERATURE)).abs().max().item()
            for (prompt, responses), logp in zip(groups, found, strict=True)
            for i, r in enumerate(responses)
        )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_equals_a_whole_pass_in_float64(case: Case, tp: int) -> None:
    """Every parameter under Hugging Face's names, and every log-probability; the ranks agree to the bit."""
    oracle = oracle_model(CONFIG, torch.float64)
    groups = two_groups(oracle)
    wanted = whole_gradients(oracle, groups, TEMPERATURE, grpo_loss)
    assert all(g.abs().max() > 1e-6 for g in wanted.values()), "a parameter that gets no gradient tests nothing"
    if case.frozen:
        wanted = {n: torch.zeros_like(g) if n.startswith("model.visual.") else g for n, g in wanted.items()}
    first, *others = run(tp, CONFIG, torch.float64, groups, case)
    assert worst(first.gathered, wanted) <= 1e-10
    assert worst_logprob(oracle, groups, first.logprobs) <= 1e-10
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first.logprobs, other.logprobs, strict=True))
        assert all(torch.equal(first.copies[n], other.copies[n]) for n in first.copies)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_step_equals_a_whole_pass_in_float32(tp: int) -> None:
    """The same in float32, against a transformers model that nothing of ours has touched."""
    oracle = oracle_model(CONFIG, torch.float32)
    groups = two_groups(oracle)
    wanted = whole_gradients(oracle, groups, TEMPERATURE, grpo_loss)
    (first, *_) = run(tp, CONFIG, torch.float32, groups, Case(recompute=True))
    assert worst(first.gathered, wanted) <= 1e-5
    assert worst_logprob(oracle, groups, first.logprobs) <= 1e-5


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("config", [tied(CONFIG), ODD], ids=["tied", "padded vocabulary"])
def test_tied_and_padded_vocabularies_images_and_text(config: dict[str, Any], tp: int) -> None:
    """A tied head sums both gradients; padding gets none, and no probability; images and text go the same way."""
    oracle = oracle_model(config, torch.float64)
    groups = [
        (video_prompt(oracle, grid=(1, 6, 6)), responses_of([4, 2])),
        (text_prompt(), responses_of([1, 3, 3], seed=4)),
    ]
    wanted = whole_gradients(oracle, groups, TEMPERATURE, grpo_loss)
    (first, *_) = run(tp, config, torch.float64, groups, Case(prefix="full"))
    assert worst(first.gathered, wanted) <= 1e-10
    assert worst_logprob(oracle, groups, first.logprobs) <= 1e-10


@pytest.mark.parametrize("tp", [1, 2])
def test_the_norm_counts_every_element_once(tp: int) -> None:
    """The ranks' sums of squares add up to the norm of the whole model's gradient, the tower's included."""
    oracle = oracle_model(CONFIG, torch.float64)
    groups = two_groups(oracle)
    whole_gradients(oracle, groups, TEMPERATURE, grpo_loss)
    wanted = float(torch.nn.utils.get_total_norm([p.grad for p in oracle.parameters()]))
    found = sum(s.squares for s in run(tp, CONFIG, torch.float64, groups, Case())) ** 0.5
    assert abs(found - wanted) <= 1e-10 * wanted
