"""Rollout samples what the model says, remembers the probability it sampled with, and stays in its memory.

prompt a  a a a a|a   r r r e          e = end token; rows of one prompt share its prefix
                      r r r r r r r
prompt b  b b|b       r e
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from host_tiny import CONFIG, arena_model, oracle_model, text_prompt, video_prompt

from rollplex.backends.data.rollout import Rollout
from rollplex.backends.host.prefix import boundary_shape, run_prefix
from rollplex.backends.host.rollout import Decoding
from rollplex.backends.host.suffix import suffix_logprobs
from rollplex.ir.errors import OutOfMemory

EOS = (7, 9)


def tiny(dtype: torch.dtype) -> Any:
    return arena_model(oracle_model(CONFIG, dtype), CONFIG, dtype)[0]


def roll(
    model: Any, prompts: Any, *, seed: int = 0, kv: int = 200_000, temperature: float = 0.9, **kwargs: Any
) -> Rollout:
    memory = torch.full((kv,), float("nan"), dtype=model.dtype)
    dice = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    decoding = Decoding(model, prompts, 6, 24, temperature, dice, memory, eos=EOS, **kwargs)
    return decoding.until(range(len(prompts)))


def prompts_of(model: Any) -> list[Any]:
    return [video_prompt(model), text_prompt(4), video_prompt(model, grid=(1, 4, 6), text=2), text_prompt(9)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_recorded_logprobs_are_those_of_the_training_forward(dtype: torch.dtype, limit: float) -> None:
    """The ratio of an on-policy update is 1: decode with a KV cache and the suffix forward agree token by token."""
    model = tiny(dtype)
    prompts = prompts_of(model)
    rollout = roll(model, prompts)
    assert rollout.lengths.unique().numel() > 1, "rows must end at different steps to test anything"
    for i, prompt in enumerate(prompts):
        slot = torch.zeros(boundary_shape(CONFIG, 40), dtype=dtype)
        kv = run_prefix(model, prompt, slot, attached=False).kv
        with torch.no_grad():
            scored = suffix_logprobs(model, kv, prompt, rollout.responses(i), 0.9)
        assert (scored - rollout.logprobs[i, :, : scored.shape[1]]).abs().max() <= limit


def test_a_response_stops_at_its_end_token() -> None:
    """The end token is the last token, never inside, and nothing is recorded behind it."""
    model = tiny(torch.float32)
    rollout = roll(model, prompts_of(model))
    for tokens, length in zip(rollout.tokens.flatten(0, 1), rollout.lengths.flatten().tolist(), strict=True):
        assert not torch.isin(tokens[: length - 1], torch.tensor(EOS)).any()
        assert length == 24 or tokens[length - 1] in EOS
        assert not tokens[length:].any()
    assert not rollout.logprobs[~rollout.mask].any()


def test_stated_lengths_end_a_response_and_end_tokens_do_not() -> None:
    """Those of one prompt, whose neighbours end where the model ends them; what is sampled stays the same."""
    model = tiny(torch.float64)
    free, stated = prompts_of(model)[:2]
    lengths = (1, 24, 7, 3, 24, 12)
    rollout = roll(model, [free, replace(stated, response_lengths=lengths)])
    without = roll(model, [free, stated])
    assert rollout.lengths[1].tolist() == list(lengths)
    assert torch.isin(rollout.tokens[1, 1], torch.tensor(EOS)).any(), "an end token among 24 that ends nothing"
    assert torch.equal(rollout.tokens[0], without.tokens[0])
    both = rollout.mask[1] & without.mask[1]
    assert torch.equal(rollout.tokens[1][both], without.tokens[1][both])


def test_the_same_generator_gives_the_same_bits_and_another_one_others() -> None:
    """Nothing but weights, prompts and the generator decides what is sampled."""
    model = tiny(torch.float32)
    first, again, other = (roll(model, prompts_of(model), seed=s) for s in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.logprobs, again.logprobs)
    assert not torch.equal(first.tokens, other.tokens)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """In float64 the rows of a prompt come out the same whatever else is in the batch."""
    model = tiny(torch.float64)
    prompts = prompts_of(model)
    together, alone = roll(model, prompts), roll(model, prompts[:1])
    assert torch.equal(together.tokens[0], alone.tokens[0])


def test_samples_follow_the_model() -> None:
    """First tokens of many rows have the frequencies of the first distribution; temperature 0 takes its mode."""
    model = tiny(torch.float64)
    prompt = text_prompt(5)
    memory = torch.zeros(2_000_000, dtype=torch.float64)
    rng = torch.Generator().manual_seed(0)
    rollout = Decoding(model, [prompt], 4000, 1, 1.0, [rng], memory, eos=EOS).until([0])
    kv = run_prefix(model, prompt, torch.zeros(boundary_shape(CONFIG, 4), dtype=torch.float64), attached=False).kv
    every = [torch.tensor([t]) for t in range(64)]
    with torch.no_grad():
        p = suffix_logprobs(model, kv, prompt, every)[:, 0].exp()
    found = torch.bincount(rollout.tokens.flatten(), minlength=64) / 4000
    assert (found - p).abs().max() < 4 * (p.max() / 4000).sqrt()
    assert roll(model, [prompt], temperature=0.0).tokens[0, 0, 0] == p.argmax()


def test_kv_memory_that_is_too_small_says_how_much() -> None:
    """The planned size is all there is."""
    model = tiny(torch.float32)
    layers, heads, dim = 3, 2, 8
    need = layers * 2 * heads * dim * (3 + 6 * 24)
    assert roll(model, [text_prompt(4)], kv=need).lengths.min() >= 1
    with pytest.raises(OutOfMemory, match=rf"needs {need * 4:,} bytes of KV, its memory is 4 bytes short"):
        roll(model, [text_prompt(4)], kv=need - 1)


def test_progress_counts_live_rows_down() -> None:
    """One call a prefill, one a decode step, until no row is left."""
    model = tiny(torch.float32)
    seen: list[tuple[int, int]] = []
    rollout = roll(model, prompts_of(model), on_step=lambda step, live: seen.append((step, live)))
    assert seen[:4] == [(0, 24)] * 4
    live = [int((rollout.lengths > s).sum()) for s in range(1, int(rollout.lengths.max()) + 1)]
    assert [n for _, n in seen[4:]] == [min(n, 24) for n in live[:-1]] + [seen[-1][1]]
    assert [step for step, _ in seen[4:]] == list(range(1, len(live) + 1))
