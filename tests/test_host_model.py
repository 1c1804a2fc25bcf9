"""The model's parameters are views of memory it does not own; everything else about it is transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_tiny import CONFIG, arena_model, oracle_model, text_prompt, tied, video_prompt, whole_logprobs

from rollplex.backends.hf.model import bind, build_model, parameter_shapes, read_config
from rollplex.ir.errors import JobError


def test_building_allocates_no_weight_and_names_are_transformers() -> None:
    """Meta parameters in named_parameters order; a tied head is listed once, as the embedding."""
    model = build_model(CONFIG, torch.bfloat16)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    oracle = {n: tuple(p.shape) for n, p in oracle_model(CONFIG, torch.float32).named_parameters()}
    assert list(parameter_shapes(CONFIG).items()) == list(oracle.items())
    assert "lm_head.weight" not in parameter_shapes(tied(CONFIG))


@pytest.mark.parametrize("config", [CONFIG, tied(CONFIG)], ids=["untied", "tied"])
def test_bound_parameters_are_the_arena_and_buffers_are_real(config: dict[str, Any]) -> None:
    """Writing the arena changes the model at once: nothing caches a weight, not even the head of a tied model."""
    oracle = oracle_model(config, torch.float32)
    model, arena = arena_model(oracle, config, torch.float32)
    prompt, response = text_prompt(), torch.tensor([4, 5])
    for _ in range(2):
        wanted = whole_logprobs(oracle, prompt, response, 1.0)
        assert torch.equal(whole_logprobs(model, prompt, response, 1.0), wanted)
        with torch.no_grad():
            arena.mul_(1.5)
            for p in oracle.parameters():
                p.mul_(1.5)
    assert {p.untyped_storage().data_ptr() for p in model.parameters()} == {arena.untyped_storage().data_ptr()}
    for (name, ours), (_, theirs) in zip(model.named_buffers(), oracle.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_mrope_positions_continue_where_transformers_would() -> None:
    """A response after a video: positions from our prompt give the logits of a plain call that derives its own."""
    oracle = oracle_model(CONFIG, torch.float32)
    prompt = video_prompt(oracle, grid=(3, 6, 4), seconds=1.0)
    assert prompt.next_position != len(prompt.input_ids)
    assert prompt.position_ids[:, -1].tolist() == [prompt.next_position - 1] * 3


def test_names_must_match() -> None:
    """A missing view is our own bug and is named."""
    model = build_model(CONFIG, torch.float32)
    views = {n: torch.zeros(p.shape) for n, p in model.named_parameters()}
    del views["lm_head.weight"]
    with pytest.raises(AssertionError, match=r"lm_head\.weight"):
        bind(model, views)


def test_other_architectures_and_lossy_attention_are_refused() -> None:
    """The split is exact only where every query sees every key."""
    with pytest.raises(JobError, match="runs model_type qwen2_5_vl, not 'llama'"):
        build_model({"model_type": "llama"}, torch.float32)
    text = {**CONFIG["text_config"], "attention_dropout": 0.1}
    with pytest.raises(JobError, match="no sliding window and no attention dropout"):
        build_model({**CONFIG, "text_config": text}, torch.float32)


def test_a_missing_config_is_named(tmp_path: Any) -> None:
    """A directory without config.json."""
    with pytest.raises(JobError, match=r"config\.json: cannot read the model config"):
        read_config(tmp_path)
