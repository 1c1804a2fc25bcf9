"""The compiler's sizes of the host engine hold what the engine really saves, and not much more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from host_tiny import CONFIG, arena_model, oracle_model, responses_of, video_prompt
from torch.autograd.graph import saved_tensors_hooks

from rollplex.backends.facts import Work
from rollplex.backends.host.facts import FACTS
from rollplex.backends.host.prefix import boundary_shape, run_prefix
from rollplex.backends.host.saved import SavedPolicy
from rollplex.backends.host.suffix import suffix_logprobs
from rollplex.ir.models import spec_from_config

CASES = [(2, 6, 8), (4, 8, 8), (1, 4, 6)]
MODEL: Any = arena_model(oracle_model(CONFIG, torch.float32), CONFIG, torch.float32)[0]


def work_of(prompt: Any, recompute: str = "none", responses: int = 4, tokens: int = 6) -> Work:
    spec = replace(spec_from_config(CONFIG, "tiny"), vocab_multiple=1)
    patches = prompt.pixel_values.shape[0]
    return Work(spec, 1, 4, True, recompute == "full", len(prompt.input_ids), patches, responses, tokens, True)


@pytest.mark.parametrize("grid", CASES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_saved_prefix_fits_its_slot(grid: tuple[int, int, int], recompute: Literal["none", "full"]) -> None:
    """saved <= formula <= saved / 0.6, for videos and an image, with and without layer recomputation."""
    prompt = video_prompt(MODEL, grid)
    slot = torch.empty(boundary_shape(CONFIG, len(prompt.input_ids)))
    saved = run_prefix(MODEL, prompt, slot, attached=True, saved=SavedPolicy(recompute=recompute)).saved_nbytes
    assert 0.6 * FACTS.prefix_saved_bytes(work_of(prompt, recompute)) <= saved
    assert saved <= FACTS.prefix_saved_bytes(work_of(prompt, recompute))


def test_the_suffix_step_fits_the_training_activations() -> None:
    """Everything autograd saves for a group's suffix, by storage, is inside what the plan reserves for the step."""
    prompt = video_prompt(MODEL, (2, 6, 8))
    slot = torch.empty(boundary_shape(CONFIG, len(prompt.input_ids)))
    kv = run_prefix(MODEL, prompt, slot, attached=False).kv.detach().requires_grad_()
    weights = {p.untyped_storage().data_ptr() for p in MODEL.parameters()} | {kv.untyped_storage().data_ptr()}
    seen: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        suffix_logprobs(MODEL, kv, prompt, responses_of([6, 6, 6, 6]), 1.0).sum().backward()
    assert 0 < sum(seen.values()) <= FACTS.train_activation_bytes(work_of(prompt))
