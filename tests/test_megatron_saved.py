"""What an attached prefix of the Megatron model keeps, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_tiny import CONFIG, oracle_model, responses_of, text_prompt, video_prompt
from megatron_tiny import Case, group_here, make_rank
from processes import ranks
from torch import Tensor

from rollplex.backends.megatron import memory
from rollplex.backends.megatron.facts import FACTS
from rollplex.backends.megatron.rank import MegatronModel
from rollplex.backends.memory.live import LiveBytes
from rollplex.backends.training.boundary import boundary_leaf
from rollplex.backends.training.gradients import FlatGradients
from rollplex.backends.training.saved import SavedPolicy
from rollplex.ir.errors import OutOfMemory
from rollplex.ir.spec import Part
from rollplex.ir.work import Work

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("megatron")]


def rank_of(*frozen: Part) -> MegatronModel:
    oracle = oracle_model(CONFIG, torch.float32)
    weights = {n: p.detach() for n, p in oracle.named_parameters()}
    return make_rank(CONFIG, weights, torch.float32, case=Case(frozen=frozen))[0]


def slot(rank: MegatronModel, tokens: int = 40) -> Tensor:
    return torch.zeros(rank.boundary_shape(tokens))


def kept(rank: MegatronModel, policy: SavedPolicy) -> int:
    prompt = video_prompt(oracle_model(CONFIG, torch.float32))
    return rank.prefix(prompt, slot(rank), attached=True, saved=policy).saved_nbytes


def test_recompute_keeps_less_and_dropped_nothing() -> None:
    """all saved tensors > layer inputs > nothing; a frozen tower keeps nothing of its own."""
    rank = rank_of()
    policies = (SavedPolicy("hbm"), SavedPolicy("hbm", "full"), SavedPolicy("dropped"))
    everything, inputs, nothing = (kept(rank, policy) for policy in policies)
    assert everything > 3 * inputs > nothing == 0
    assert kept(rank_of("vision"), SavedPolicy("hbm")) < 0.7 * everything


def test_no_weight_is_saved() -> None:
    """Megatron's linears save their weight for the backward, ours saves its transpose: neither reaches the pool."""
    rank = rank_of()
    short = rank.prefix(text_prompt(3), slot(rank), attached=True, saved=SavedPolicy("hbm")).saved_nbytes
    assert short < sum(p.numel() for p in rank.model.parameters())


def test_slots_that_are_too_small_name_the_prompt_and_the_bytes() -> None:
    """A pool's slot and a boundary slot."""
    rank, prompt = rank_of(), video_prompt(oracle_model(CONFIG, torch.float32))
    pool = torch.zeros(8192, dtype=torch.uint8)
    with pytest.raises(
        OutOfMemory, match=r"row 1: the saved state .* needs more than [\d,]+ bytes, its slot has 8,192"
    ):
        rank.prefix(prompt, slot(rank), attached=True, saved=SavedPolicy("host", pool=pool))
    with pytest.raises(OutOfMemory, match="row 2: the prompt has 8 prefix tokens, its boundary slot 7"):
        rank.prefix(text_prompt(9), slot(rank, 7), attached=False)


# ---- measured against the plan's figure

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int, int] | None, int]] = {
    "tiny": ({}, {}, (2, 6, 8), 5),
    "one window": ({}, {}, (1, 4, 4), 5),
    "uneven windows": ({}, {}, (3, 10, 6), 5),
    "text only": ({}, {}, None, 40),
    "long prompt": ({}, {}, (2, 6, 8), 150),
    "wide mlps": ({"intermediate_size": 400}, {"intermediate_size": 300}, (2, 4, 4), 5),
    "deep": ({"num_hidden_layers": 6}, {"depth": 4}, (2, 6, 8), 15),
}


def measured(shape: str, dtype: torch.dtype, recompute: str, sequence: bool) -> dict[str, tuple[int, int]]:
    """Bytes that each kind of work takes on this rank, and those that it is planned with."""
    text, vision, grid, words = SHAPES[shape]
    config = {**CONFIG, "text_config": CONFIG["text_config"] | text, "vision_config": CONFIG["vision_config"] | vision}
    oracle, group = oracle_model(config, dtype), group_here()
    weights = {n: p.detach() for n, p in oracle.named_parameters()}
    rank, _ = make_rank(config, weights, dtype, group, Case(sequence=sequence))
    rank.accumulate(FlatGradients(torch.zeros(memory.numel(rank.trained), dtype=dtype)))
    prompt = video_prompt(oracle, grid, words) if grid else text_prompt(2 * words)
    slot, responses = torch.zeros(rank.boundary_shape(prompt.prefix_tokens), dtype=dtype), responses_of([7] * 4)
    policy = SavedPolicy("host", recompute, torch.zeros(32 << 20, dtype=torch.uint8))  # pyright: ignore[reportArgumentType]
    with LiveBytes() as attached:
        prefix = rank.prefix(prompt, slot, attached=True, saved=policy)
    saved = prefix.saved_nbytes
    with torch.no_grad(), LiveBytes() as score:
        rank.logprobs(prefix, prefix.kv, responses, 1.0)
    leaf = boundary_leaf(prefix.kv)
    with LiveBytes() as suffix:
        rank.logprobs(prefix, leaf, responses, 1.0, recompute=recompute == "full").sum().backward()
    assert leaf.grad is not None
    with LiveBytes() as backward:
        rank.prefix_backward(prefix, leaf.grad)
    work = Work(
        rank.spec, group.size() if group else 1, dtype.itemsize, sequence, recompute == "full",
        prompt.prefix_tokens + 1, prompt.patches, 4, 7, vision_grad=True, on_cpu=True,
    )  # fmt: skip
    return {
        "saved": (saved, FACTS.prefix_saved_bytes(work)),
        "prefix": (attached.peak_bytes, FACTS.prefix_workspace_bytes(work, True)),
        "score": (score.peak_bytes, FACTS.score_workspace_bytes(work)),
        "train": (max(suffix.peak_bytes, backward.peak_bytes), FACTS.train_activation_bytes(work)),
    }


@pytest.mark.parametrize(("tp", "sequence"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", SHAPES)
def test_measured_bytes_fit_their_formula(shape: str, recompute: str, tp: int, sequence: bool) -> None:
    """Upper bounds; the saved state, which has a slot of the pool for each prompt, is not much less."""
    for dtype in (torch.float32, torch.float64):
        task = (shape, dtype, recompute, sequence)
        for rank in [measured(*task)] if tp == 1 else ranks(tp).run(measured, *task):
            for name, (found, planned) in rank.items():
                least = 0.6 if name == "saved" else 0.05
                assert least <= found / planned <= 1, f"{name}, {dtype}: {found:,} of {planned:,} bytes"
