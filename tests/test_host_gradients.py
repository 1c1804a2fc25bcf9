"""Gradients through the prefix / suffix split equal one full-sequence pass of plain transformers.

prompt   v v v v t t t | t          prefix (one forward, one backward) | suffix (n responses, their own backward)
                       | r r r
                       | r r r r r
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from host_tiny import (
    CONFIG,
    arena_model,
    grpo_loss,
    oracle_model,
    responses_of,
    text_prompt,
    tied,
    video_prompt,
    whole_gradients,
    whole_logprobs,
)
from torch import Tensor

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.hf.model import freeze
from rollplex.backends.host.prefix import boundary_shape, run_prefix
from rollplex.backends.host.suffix import suffix_logprobs
from rollplex.backends.training.boundary import boundary_leaf, prefix_backward
from rollplex.backends.training.saved import SavedPolicy

POOL = 4 << 20
POLICIES = {
    "hbm": lambda: SavedPolicy("hbm"),
    "hbm in a slot": lambda: SavedPolicy("hbm", pool=torch.zeros(POOL, dtype=torch.uint8)),
    "hbm, full recompute": lambda: SavedPolicy("hbm", "full"),
    "host": lambda: SavedPolicy("host", pool=torch.zeros(POOL, dtype=torch.uint8)),
    "host, full recompute": lambda: SavedPolicy("host", "full", torch.zeros(POOL, dtype=torch.uint8)),
    "dropped": lambda: SavedPolicy("dropped"),
    "dropped, full recompute": lambda: SavedPolicy("dropped", "full"),
}
Groups = Sequence[tuple[Prompt, list[Tensor]]]


def split_gradients(
    model: Any, config: dict[str, Any], groups: Groups, policy: str, *, recompute: bool = False, rows: int = 256
) -> dict[str, Tensor]:
    """All prefixes first, as in phase 1; then each group's suffix and, last, its prefix backward."""
    model.zero_grad()
    prefixes = []
    for prompt, _ in groups:
        slot = torch.full(boundary_shape(config, 40), float("nan"), dtype=model.dtype)
        prefixes.append(run_prefix(model, prompt, slot, attached=True, saved=POLICIES[policy]()))
    for (prompt, responses), result in zip(groups, prefixes, strict=True):
        leaf = boundary_leaf(result.kv)
        logp = suffix_logprobs(model, leaf, prompt, responses, 0.7, recompute=recompute, logit_rows=rows)
        mask = torch.arange(logp.shape[1]) < torch.tensor([len(r) for r in responses])[:, None]
        grpo_loss(logp, mask).backward()
        result.kv.fill_(float("nan"))  # the slot is someone else's by the time of the prefix backward
        assert leaf.grad is not None
        prefix_backward(result, leaf.grad)
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max((found[n] - wanted[n]).abs().max().item() for n in wanted)


def two_groups(model: Any) -> Groups:
    return [
        (video_prompt(model), responses_of([3, 7, 1, 5])),
        (video_prompt(model, grid=(3, 4, 4), text=3, seed=8), responses_of([6, 2], seed=9)),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_split_gradients_equal_a_whole_pass_in_float64(policy: str) -> None:
    """Every parameter, the vision tower included; two groups of responses of different lengths accumulate."""
    oracle = oracle_model(CONFIG, torch.float64)
    model, _ = arena_model(oracle, CONFIG, torch.float64)
    wanted = whole_gradients(oracle, two_groups(oracle), 0.7, grpo_loss)
    found = split_gradients(model, CONFIG, two_groups(model), policy)
    assert all(g.abs().max() > 1e-6 for g in wanted.values()), "a parameter that gets no gradient tests nothing"
    assert worst(found, wanted) <= 1e-10


@pytest.mark.parametrize("policy", ["hbm", "host", "host, full recompute", "dropped"])
def test_split_gradients_equal_a_whole_pass_in_float32(policy: str) -> None:
    """The same in float32, against a transformers model that nothing of ours has touched."""
    oracle = oracle_model(CONFIG, torch.float32)
    model, _ = arena_model(oracle, CONFIG, torch.float32)
    wanted = whole_gradients(oracle, two_groups(oracle), 0.7, grpo_loss)
    scale = max(g.abs().max().item() for g in wanted.values())
    assert worst(split_gradients(model, CONFIG, two_groups(model), policy), wanted) <= 1e-5 * max(1.0, scale)


def test_tied_embeddings_image_and_text_prompts_and_small_logit_chunks() -> None:
    """A tied head sums both gradients; images and text go the same way; suffix layers may be recomputed too."""
    config = tied(CONFIG)
    oracle = oracle_model(config, torch.float64)
    model, _ = arena_model(oracle, config, torch.float64)
    groups = [
        (video_prompt(model, grid=(1, 6, 6)), responses_of([4, 2])),
        (text_prompt(), responses_of([1, 3, 3], seed=4)),
    ]
    wanted = whole_gradients(oracle, groups, 0.7, grpo_loss)
    found = split_gradients(model, config, groups, "host, full recompute", recompute=True, rows=3)
    assert "lm_head.weight" not in found
    assert worst(found, wanted) <= 1e-10


def test_frozen_vision_builds_no_graph() -> None:
    """With the tower frozen the language model's gradients stay the same and the tower saves nothing."""
    oracle = oracle_model(CONFIG, torch.float64)
    model, _ = arena_model(oracle, CONFIG, torch.float64)
    slot = torch.zeros(boundary_shape(CONFIG, 40), dtype=torch.float64)
    thawed = run_prefix(model, video_prompt(model), slot, attached=True).saved_nbytes
    wanted = whole_gradients(oracle, two_groups(oracle), 0.7, grpo_loss)
    freeze(model, ["model.visual."])
    assert run_prefix(model, video_prompt(model), slot, attached=True).saved_nbytes < 0.7 * thawed
    found = split_gradients(model, CONFIG, two_groups(model), "hbm")
    assert all(g.abs().max() == 0 for n, g in found.items() if n.startswith("model.visual."))
    language = {n: g for n, g in wanted.items() if not n.startswith("model.visual.")}
    assert worst({n: found[n] for n in language}, language) <= 1e-10


def test_detached_scores_equal_a_whole_pass() -> None:
    """A reference: no graph, the same log-probabilities."""
    oracle = oracle_model(CONFIG, torch.float64)
    model, _ = arena_model(oracle, CONFIG, torch.float64)
    prompt, responses = two_groups(model)[0]
    slot = torch.zeros(boundary_shape(CONFIG, 40), dtype=torch.float64)
    result = run_prefix(model, prompt, slot, attached=False)
    with torch.no_grad():
        logp = suffix_logprobs(model, result.kv, prompt, responses, 0.7)
        wanted = [whole_logprobs(oracle, prompt, r, 0.7) for r in responses]
    assert result.saved_nbytes == 0
    assert not result.kv.requires_grad
    assert max((logp[i, : len(w)] - w).abs().max().item() for i, w in enumerate(wanted)) <= 1e-6
    assert logp[0, 3:].abs().max() == 0
