"""vLLM as the rollout engine, in threads of this process: its parameters are the trainer's pages, and stay so.

One engine serves all tests of this file, as it takes seconds to start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime_threads import TRAIN, InThreads
from runtime_tiny import luck
from vllm_tiny import needs_vllm, vllm_plan

from rollplex.backends.data.batch import PromptBatch
from rollplex.backends.data.rollout import Rollout
from rollplex.ir.errors import EngineError
from rollplex.ir.steps import Run, Step
from rollplex.runtime.protocol import ProcessId

pytestmark = needs_vllm
torch.set_num_threads(1)
ENDS = tuple(range(0, 264, 5))


class Watched:
    """Two steps, and what passed through them; the pages of keys and values stay mapped for the tests behind them."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self.prompts: list[PromptBatch] = []
        self.mapped: list[bool] = []
        self.run = InThreads(vllm_plan(), {"reward": luck}, self._look)
        self.run.feed._eos = ENDS
        self.threads = torch.get_num_threads()
        for step in range(2):
            self.run.step(step)

    @property
    def sampler(self) -> Any:
        return self.run.rollout.sampler

    @property
    def model(self) -> Any:
        return self.sampler.runner.model

    def _look(self, process: ProcessId, step: Step) -> None:
        objects = self.run.rollout.objects
        if process == TRAIN and isinstance(step, Run) and step.task == "grad_norm":
            values = self.run.states[TRAIN].values
            self.rollouts.append(values["rollout"])
            self.prompts.append(values["prompts"])
            self.mapped.append(objects.mapped("rollout.kv"))


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    found = Watched()
    yield found
    found.run.close()


def test_every_parameter_lies_in_pages_of_the_trainer(watched: Watched) -> None:
    """And in no other memory: fused QKV and gate/up, the head, the tower, none of them twice."""
    pages = [watched.run.rollout.objects.pages(name, torch.uint8) for name in ("actor.snapshot", "actor.vision")]
    spans = [(p.data_ptr(), p.data_ptr() + p.numel()) for p in pages]
    parameters = dict(watched.model.named_parameters())
    assert all(any(a <= p.data_ptr() < b for a, b in spans) for p in parameters.values())
    assert len({p.data_ptr() for p in parameters.values()}) == len(parameters)
    assert watched.run.rollout.objects.inodes() == watched.run.train.objects.inodes()


def test_what_the_trainer_writes_is_what_vllm_reads_next(watched: Watched) -> None:
    name = "model.language_model.norm.weight"
    ours = watched.run.train._replicas["actor"].weights[name]
    theirs = watched.model.language_model.model.norm
    x = torch.randn(3, 128)
    before, kept = theirs(x), ours.clone()
    with torch.no_grad():
        ours.mul_(2)
    after = theirs(x)
    with torch.no_grad():
        ours.copy_(kept)
    torch.testing.assert_close(after, 2 * before)
    assert torch.equal(theirs(x), before)


def test_responses_end_with_their_end_token_or_at_the_budget(watched: Watched) -> None:
    lengths = set()
    for rollout in watched.rollouts:
        for tokens, length in zip(rollout.tokens.flatten(0, 1), rollout.lengths.flatten().tolist(), strict=True):
            inside = [t in ENDS for t in tokens[:length].tolist()]
            assert not any(inside[:-1])
            assert inside[-1] or length == 12
            assert not tokens[length:].any()
            lengths.add(length)
    assert len(lengths) > 2
    assert all(((r.versions > 0) == r.mask).all() for r in watched.rollouts)


def test_stated_lengths_end_a_response_and_end_tokens_do_not(watched: Watched) -> None:
    prompts, lengths = watched.prompts[-1], (1, 12, 7, 3)
    stated = replace(prompts, prompts=(replace(prompts[0], response_lengths=lengths), prompts[1]))
    with watched.run.rollout.objects.lent("rollout.kv"):
        watched.sampler.begin([1, 2])
        rollout = watched.sampler.decoding(stated, None, 3).until([0, 1])
    assert rollout.lengths[0].tolist() == list(lengths)
    assert torch.isin(rollout.tokens[0, 1, :11], torch.tensor(ENDS)).any(), "an end token that ends nothing"
    assert int(rollout.lengths[1].min()) < 12


def test_a_prompt_is_prefilled_once_for_all_its_responses(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one request of a prompt find every whole block of it, whatever pieces it was prefilled in."""
    engine, found, step = watched.sampler._engine, {}, watched.sampler._engine.step

    def counted() -> list[Any]:
        outputs = step()
        found.update((o.request_id, o.num_cached_tokens) for o in outputs if o.finished)
        return outputs

    monkeypatch.setattr(engine, "step", counted)
    prompts, block = watched.prompts[-1], engine.vllm_config.cache_config.block_size
    with watched.run.rollout.objects.lent("rollout.kv"):
        watched.sampler.begin([1, 2])
        watched.sampler.decoding(prompts, None, 3).until([0, 1])
    for p, prompt in enumerate(prompts):
        whole = prompt.prefix_tokens // block * block
        assert [found[f"{p}.{r}"] for r in range(4)] == [0, whole, whole, whole]
        assert whole > 0


def test_the_youngest_response_tells_how_old_decode_is(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every step: responses that are not finished, and the tokens of the last to begin, prefill apart."""
    engine, step, told = watched.sampler._engine, watched.sampler._engine.step, list[tuple[int, int]]()
    sampled, ended, due = dict[str, int](), set[str](), [(8, 0)]

    def counted() -> list[Any]:
        outputs = step()
        for output in outputs:
            sampled[output.request_id] = sampled.get(output.request_id, 0) + len(output.outputs[0].token_ids)
            ended.update([output.request_id] if output.finished else [])
        due.extend([(8 - len(ended), min(sampled.values()) if len(sampled) == 8 else 0)] if outputs else [])
        return outputs

    monkeypatch.setattr(engine, "step", counted)
    hears = SimpleNamespace(live=lambda live, tokens: told.append((live, tokens)))
    monkeypatch.setattr(watched.sampler, "_served", hears)
    prompts = watched.prompts[-1]
    stated = replace(prompts, prompts=tuple(replace(p, response_lengths=(9, 10, 11, 12)) for p in prompts.prompts))
    with watched.run.rollout.objects.lent("rollout.kv"):
        watched.sampler.begin([1, 2])
        rollout = watched.sampler.decoding(stated, None, 3).until([0, 1])
    young = max(tokens for live, tokens in due if live == 8)
    at = due.index((8, young))
    assert young >= 5, "all decode for a while"
    assert told[: at + 1] == due[: at + 1]
    assert [live for live, _ in told] == [live for live, _ in due]
    assert [tokens for _, tokens in told[at:]] == list(range(young, young + len(told) - at))
    assert rollout.lengths.tolist() == [[9, 10, 11, 12]] * 2


def test_keys_and_values_have_pages_only_while_the_plan_says_so(watched: Watched) -> None:
    """Behind the rollout they are gone; vLLM's caches are views of their addresses all the same."""
    assert watched.mapped == [False, False]
    kv = watched.run.rollout.objects.pages("rollout.kv", torch.uint8)
    for cache in watched.sampler.runner.kv_caches:
        assert kv.data_ptr() <= cache.data_ptr() < kv.data_ptr() + kv.numel()


def test_positions_are_those_of_the_data_set(watched: Watched) -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    from rollplex.backends.vllm.inputs import EngineInput

    prompt = watched.prompts[0][0]
    assert prompt.modality == "video"
    given = EngineInput(prompt, {"image": 262, "video": 263}).with_response([7, 8])
    (item,), (place,) = given["mm_kwargs"]["video"], given["mm_placeholders"]["video"]
    feature = MultiModalFeatureSpec(data=item, modality="video", identifier="x", mm_position=place)
    positions, delta = watched.model.get_mrope_input_positions(given["prompt_token_ids"], [feature])
    behind = prompt.next_position + torch.arange(2)
    assert torch.equal(positions, torch.cat([prompt.position_ids, behind.expand(3, -1)], dim=1))
    assert delta == prompt.next_position - len(prompt.input_ids)
    assert place.length == int((prompt.input_ids == 263).sum())


def test_the_tower_gives_transformers_embeddings(watched: Watched) -> None:
    prompt = watched.prompts[0][0]
    host: Any = watched.run.train._replicas["actor"]
    assert prompt.pixel_values is not None
    assert prompt.grid_thw is not None
    with torch.no_grad():
        ours = watched.model.visual(prompt.pixel_values, grid_thw=prompt.grid_thw.tolist())
        theirs = host.model.model.get_video_features(prompt.pixel_values, prompt.grid_thw).pooler_output[0]
    assert (ours - theirs).abs().max() <= 1e-5


def test_threads_and_environment_are_what_they_were(watched: Watched) -> None:
    """vLLM's CPU worker takes torch.set_num_threads away; nothing of it is left in this process."""
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(watched.threads)


def test_a_model_with_other_parameters_is_refused(watched: Watched) -> None:
    from rollplex.backends.vllm.loader import bind

    views = dict(watched.model.named_parameters())
    name = "visual.merger.ln_q.weight"
    with pytest.raises(EngineError, match=rf"vLLM has other parameters than the plan: {name}"):
        bind(watched.model, {n: v for n, v in views.items() if n != name})
    with pytest.raises(EngineError, match=rf"{name} is \[32\] torch.float32 in vLLM, \[33\] torch.float32 in the plan"):
        bind(watched.model, {**views, name: torch.zeros(33)})


def test_weights_are_published_and_never_loaded(watched: Watched) -> None:
    """vLLM's own ways of loading would write its order over the trainer's."""
    from rollplex.backends.vllm.loader import SharedPagesLoader

    loader: Any = SharedPagesLoader(watched.sampler.runner.load_config)
    with pytest.raises(EngineError, match="weights of this engine are pages of the trainer"):
        loader.load_weights(watched.model, None)


def test_a_preempted_request_ends_the_run(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollplex.backends.vllm.decoding import VllmDecoding

    engine = watched.sampler._engine
    preempted = {"0.0": SimpleNamespace(num_preemptions=1)}
    monkeypatch.setattr(engine.engine_core.engine_core.scheduler, "requests", preempted)
    monkeypatch.setattr(engine, "step", list)
    decoding = VllmDecoding.__new__(VllmDecoding)
    decoding._engine, decoding._waiting = engine, {"0.0": (0, 0)}
    with pytest.raises(EngineError, match="vLLM has preempted 1 requests, for which the plan has blocks of KV"):
        decoding.until([0])


def test_prefixes_of_old_weights_that_stay_are_refused(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched.sampler._engine, "reset_prefix_cache", lambda: False)
    with pytest.raises(EngineError, match="vLLM keeps prefixes of the old weights"):
        watched.sampler.begin([1, 2])
