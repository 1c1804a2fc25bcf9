"""The bytes a plan reserves for the host engine hold what the engine then really needs, and not much more.

saved state      measured by the hooks that pack it          <= formula, >= 60 % of it
workspaces       measured by an allocation-counting mode     <= formula, >= 40 % of it
prefix backward  the formula covers a dropped prefix, run again in working memory
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from host_tiny import CONFIG, arena_model, oracle_model, responses_of, text_prompt, video_prompt

from rollplex.backends.host.prefix import boundary_shape, run_prefix
from rollplex.backends.host.suffix import suffix_logprobs
from rollplex.backends.memory.live import LiveBytes
from rollplex.backends.training import sizes
from rollplex.backends.training.boundary import boundary_leaf, prefix_backward
from rollplex.backends.training.saved import SavedPolicy
from rollplex.ir.models import spec_from_config
from rollplex.ir.work import Work


@dataclass(frozen=True)
class Case:
    """A model that differs from the tiny one, and the work of one prompt group."""

    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    grid: tuple[int, int, int] | None = (2, 6, 8)
    words: int = 5
    responses: int = 4
    tokens: int = 7
    dtype: torch.dtype = torch.float32


CASES = {
    "tiny": Case(),
    "float64": Case(dtype=torch.float64),
    "one window": Case(grid=(1, 4, 4)),
    "uneven windows": Case(grid=(3, 10, 6)),
    "text only": Case(grid=None, words=40),
    "long prompt": Case(words=150, responses=2, tokens=30),
    "wide vocabulary": Case(text={"vocab_size": 2000}, grid=(2, 4, 4)),
    "wide mlps": Case(text={"intermediate_size": 400}, vision={"intermediate_size": 300}, grid=(2, 4, 4)),
    "deep, long responses": Case({"num_hidden_layers": 6}, {"depth": 4}, words=15, tokens=70),
    "as the shapes example": Case(
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 320},
        {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 96},
        grid=(4, 6, 6), words=20, responses=8, tokens=24,
    ),
}  # fmt: skip


def config_of(case: Case) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    config["text_config"] |= case.text
    config["vision_config"] |= case.vision
    half = config["text_config"]["hidden_size"] // config["text_config"]["num_attention_heads"] // 2
    config["text_config"]["rope_parameters"]["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return config


def measure(case: Case, recompute: str, where: str = "host") -> tuple[dict[str, int], Work]:
    """Peaks of each kind of work, and the Work that describes it; gradients leave as they become final."""
    config = config_of(case)
    model, _ = arena_model(oracle_model(config, case.dtype), config, case.dtype)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    prompt = video_prompt(model, case.grid, case.words) if case.grid else text_prompt(2 * case.words)
    slot = torch.zeros(boundary_shape(config, prompt.prefix_tokens), dtype=case.dtype)
    responses = responses_of([case.tokens] * case.responses)
    pool = torch.zeros(32 << 20, dtype=torch.uint8) if where == "host" else None
    found: dict[str, int] = {}
    with LiveBytes() as live:
        run_prefix(model, prompt, slot, attached=False)
    found["prefix, detached"] = live.peak_bytes
    with LiveBytes() as live:
        result = run_prefix(model, prompt, slot, attached=True, saved=SavedPolicy(where, recompute, pool))  # pyright: ignore[reportArgumentType]
    found |= {"prefix, attached": live.peak_bytes, "saved": result.saved_nbytes}
    with torch.no_grad(), LiveBytes() as live:
        suffix_logprobs(model, result.kv, prompt, responses)
    found["score"] = live.peak_bytes
    leaf = boundary_leaf(result.kv)
    with LiveBytes() as live:
        suffix_logprobs(model, leaf, prompt, responses, recompute=recompute == "full").sum().backward()
    found["suffix"] = live.peak_bytes
    assert leaf.grad is not None
    with LiveBytes() as live:
        prefix_backward(result, leaf.grad)
    found["prefix backward"] = live.peak_bytes
    work = Work(
        spec_from_config(config, "tiny"), 1, case.dtype.itemsize, False, recompute == "full",
        prompt.prefix_tokens + 1, prompt.patches, case.responses, case.tokens, vision_grad=True,
    )  # fmt: skip
    return found, work


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("case", CASES)
def test_measured_bytes_fit_their_formula(case: str, recompute: str) -> None:
    """Every kind of work, with and without recompute, over shapes that stress each term."""
    found, work = measure(CASES[case], recompute)
    planned = {
        "prefix, detached": sizes.prefix_workspace_bytes(work, False),
        "prefix, attached": sizes.prefix_workspace_bytes(work, True),
        "saved": sizes.prefix_saved_bytes(work),
        "score": sizes.score_workspace_bytes(work),
        "suffix": sizes.suffix_train_bytes(work),
        "prefix backward": sizes.prefix_backward_bytes(work),
    }
    for name, nbytes in planned.items():
        share = found[name] / nbytes
        least = {"saved": 0.6, "prefix backward": 0.0}.get(name, 0.4)
        assert least <= share <= 1, f"{name}: {found[name]:,} of {nbytes:,} bytes"


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("case", ["tiny", "deep, long responses", "as the shapes example"])
def test_a_dropped_prefix_fits_the_prefix_backward(case: str, recompute: str) -> None:
    """Made again in working memory: the figure that bounds every policy."""
    found, work = measure(CASES[case], recompute, where="dropped")
    assert found["saved"] == 0
    assert 0.4 * sizes.prefix_backward_bytes(work) <= found["prefix backward"] <= sizes.prefix_backward_bytes(work)


def test_a_frozen_tower_saves_nothing() -> None:
    """Its share of the saved state is gone; the rest stays."""
    _, work = measure(CASES["tiny"], "none")
    frozen = Work(**{**work.__dict__, "vision_grad": False})
    text = Work(**{**frozen.__dict__, "patches": 0})
    assert sizes.prefix_saved_bytes(frozen) == sizes.prefix_saved_bytes(text) < sizes.prefix_saved_bytes(work) / 2
