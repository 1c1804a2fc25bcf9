"""Steps that do not wait for every response: which prompts are trained, and that nothing else changes.

oversample    groups      0        1       2        3              two of four are awaited
              tokens   |-------| |---| |---------| |--|            3 and 1 are complete first: 1 and 3 are taken
partial       next step   0        2       4        5              0 and 2 go on where they stopped: ....|---|
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_runs import Watched
from algorithm_runs import plan_of as algorithm_plan
from host_tiny import CONFIG, arena_model, oracle_model, text_prompt
from runtime_threads import TRAIN, InThreads
from runtime_tiny import luck, tiny_plan
from textbook import Score, Textbook, Whole
from textbook import Step as Book
from torch import Tensor

from rollplex.backends.data.rollout import Rollout
from rollplex.backends.host.rollout import Decoding
from rollplex.backends.host.sampler import HostSampler
from rollplex.backends.rollout.unfinished import Unfinished
from rollplex.backends.training.placement import config_of
from rollplex.ir.checker import verify_plan
from rollplex.ir.errors import PlanError
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run, Step
from rollplex.runtime.carrying import keep, take_up
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.run import run_plan
from rollplex.runtime.steprows import StepRows

torch.set_num_threads(1)
SAMPLED, TAKEN, GROUP, BUDGET, STEPS = 4, 2, 2, 12, 3
OFTEN = tuple(range(0, 264, 6))
"""Token ids that end a response: so many that lengths differ."""
ROLLOUT = {"engine": "host", "kv_cache_gib": "512 KiB", "runtime_gib": "256 KiB"}
ROLES: dict[str, Any] = {
    "actor": {"train": {"engine": "host"}, "rollout": ROLLOUT},
    "reference": {"score": {"engine": "host"}},
}


def megatron(tp: int) -> dict[str, Any]:
    return {"engine": "megatron", "tensor_parallel": tp, "sequence_parallel": False}


OVERSAMPLE = {"kind": "oversample", "factor": SAMPLED / TAKEN}
PARTIAL = {"kind": "partial", "share": TAKEN / SAMPLED}


def plan_of(schedule: str, saved: str = "auto", mode: dict[str, Any] = OVERSAMPLE) -> Plan:
    actor = {**ROLES["actor"], "prefix_saved": saved}
    load = {"prompts": TAKEN, "group": GROUP, "response_tokens": BUDGET}
    return tiny_plan(
        schedule=schedule,
        cluster={"capacity_gib": "32 MiB"},
        roles={**ROLES, "actor": actor},
        workload={**load, "rollout": mode},
    )


class Sampling:
    """A run in threads, and what it sampled: of each step the rollout that was handed over, and all that might be."""

    def __init__(self, plan: Plan) -> None:
        self.handed_over: list[Rollout] = []
        self.trained: list[list[str]] = []
        self.everything: list[Rollout] = []
        self.run = InThreads(plan, {"reward": luck}, self._look)
        self.run.feed._eos = OFTEN
        for step in range(STEPS):
            self.run.step(step)
        state = self.run.states[TRAIN]
        self.digests = self.run.train.digests() | self.run.rollout.digests() | state.updates["actor"].digests()
        self.run.close()

    def _look(self, process: ProcessId, step: Step) -> None:
        state = self.run.states[process]
        if process.kind == "rollout" and isinstance(step, Run):
            self.everything.append(self._all(state.values["prompts"]))
        if process == TRAIN and isinstance(step, Run) and step.task == "grad_norm":
            self.handed_over.append(state.values["rollout"])
            sampled = self.run.feed.rows_of(state.iteration)
            self.trained.append([sampled[i].id for i in self.handed_over[-1].taken.tolist()])

    def _all(self, prompts: Any) -> Rollout:
        """The same prompts sampled to their ends, from the same weights and dice."""
        sampler = self.run.rollout.sampler
        assert isinstance(sampler, HostSampler)
        dice = [torch.Generator().set_state(die.get_state()) for die in sampler.dice]
        room = torch.zeros(1 << 20)
        decoding = Decoding(sampler.model, prompts.prompts, GROUP, BUDGET, 1.0, dice, room, eos=prompts.eos)
        return decoding.until(range(len(prompts.prompts)))


@cache
def watched(schedule: str, saved: str = "auto") -> Sampling:
    return Sampling(plan_of(schedule, saved))


def first_complete(rollout: Rollout) -> list[int]:
    """The prompts whose longest response ends first, the lower number where two end together; ascending."""
    longest = rollout.lengths.max(1).values.tolist()
    return sorted(sorted(range(SAMPLED), key=lambda p: (longest[p], p))[:TAKEN])


def test_the_first_prompts_to_complete_are_taken_with_the_responses_that_they_would_have_anyway() -> None:
    found = watched("rollplex")
    for rollout, everything in zip(found.handed_over, found.everything, strict=True):
        taken = rollout.taken.tolist()
        assert taken == first_complete(everything)
        assert rollout.same_as(everything.take(rollout.taken))
        torch.testing.assert_close(rollout.logprobs, everything.take(rollout.taken).logprobs)
    assert len({tuple(r.taken.tolist()) for r in found.handed_over}) > 1  # not always the same places
    assert all(r.lengths.min() < BUDGET for r in found.handed_over)


def test_a_step_samples_for_rows_of_its_own_and_trains_on_some_of_them() -> None:
    """Rows that a step leaves are discarded: the next one does not sample for them, nor twice for any."""
    found = watched("rollplex")
    seen = [row.id for step in range(STEPS) for row in found.run.feed.rows_of(step)]
    assert len(seen) == len(set(seen)) == STEPS * SAMPLED
    assert [len(rows) for rows in found.trained] == [TAKEN] * STEPS


@pytest.mark.parametrize("saved", ["hbm", "host", "dropped"])
def test_prefixes_of_all_sampled_prompts_give_the_bits_of_prefixes_of_those_taken(saved: str) -> None:
    """Under `rollplex` they run before it is known which are taken, each in a slot of its own; serial knows."""
    plan = plan_of("rollplex", saved)
    assert plan.not_executable == ()
    assert {o.slots for o in plan.summary.objects if o.class_ == "boundary"} == {SAMPLED}
    assert {o.slots for o in plan_of("serial").summary.objects if o.class_ == "boundary"} == {TAKEN}
    assert watched("rollplex", saved).digests == watched("serial").digests


def test_two_gpus_each_take_their_share_of_what_they_sampled(tmp_path: Path) -> None:
    """Processes: a training rank has the prefixes of its own prompts, so its engine's first to complete are taken."""
    load = {"prompts": 2, "rollout": {"kind": "oversample", "factor": 2}}
    results = [
        run_plan(
            tiny_plan(cluster={"gpus_per_node": 2}, workload=load, schedule=schedule),
            hosts={"reward": luck},
            out_dir=tmp_path / schedule,
        )
        for schedule in ("serial", "rollplex")
    ]
    assert results[0].digests == results[1].digests


def test_a_prefix_that_does_not_know_which_prompts_are_taken_is_refused_by_the_checker() -> None:
    """Under `serial` it runs behind the rollout, and is of the prompts that are taken alone."""

    def forget(step: Step) -> Step:
        late = isinstance(step, Run) and step.task == "prefix"
        return step.model_copy(update={"inputs": ("prompts",)}) if late else step

    plan = plan_of("serial")
    programs = {**plan.programs, "train": tuple(forget(step) for step in plan.programs["train"])}
    with pytest.raises(PlanError, match="is made of %rollout, which is not among its inputs"):
        verify_plan(plan.model_copy(update={"programs": programs}))


def test_what_engines_cannot_share_out_is_refused() -> None:
    """Three of six prompts over two engines: the ranks of a TP 2 trainer wait for all three."""
    plan = tiny_plan(
        cluster={"gpus_per_node": 2, "capacity_gib": "64 MiB"},
        roles={"actor": {"train": megatron(2), "rollout": ROLLOUT}, "reference": {"score": megatron(2)}},
        workload={"prompts": 3, "rollout": {"kind": "oversample", "factor": 2}},
    )
    assert plan.not_executable == ("3 prompts over 2 rollout engines: each hands over as many",)


# ---- partial rollout


LONGER = 4
PARTIAL_LOAD = {"prompts": TAKEN, "group": GROUP, "response_tokens": BUDGET, "rollout": PARTIAL}


def tiny_model() -> Any:
    return arena_model(oracle_model(CONFIG, torch.float64), CONFIG, torch.float64)[0]


@cache
def partial(schedule: str) -> Continued:
    return Continued(algorithm_plan("grpo", schedule=schedule, workload=PARTIAL_LOAD))


class Recorded(Textbook):
    """A textbook trainer whose ratios are to the log-probabilities that rollout has recorded."""

    def _seen(self, prompts: Any, rollouts: list[Any], histories: list[Any], score: Score) -> Book:
        (rollout,) = rollouts
        lengths = rollout.lengths
        every = [(p, r) for p in range(len(prompts)) for r in range(lengths.shape[1])]
        old = {(p, r): rollout.logprobs[p, r, : lengths[p, r]].clone() for p, r in every}
        return replace(super()._seen(prompts, rollouts, histories, score), old=old)


class Continued:
    """Steps of partial rollout in threads, each with the weights that sampled in it and a textbook's step beside it."""

    def __init__(self, plan: Plan) -> None:
        self.watched = Watched(plan)
        book = self.watched.textbook("grpo")
        self.book = Recorded(book.job, book.models, book.loss)
        self.steps: list[tuple[Any, Rollout]] = []
        self.rows: list[list[int]] = []
        self.weights: list[Whole] = []
        self.found: list[tuple[float, float]] = []
        for step in range(LONGER):
            self._step(step)
        self.digests = self.watched.digests()
        self.watched.run.close()

    def _step(self, step: int) -> None:
        watched, book = self.watched, self.book
        self.weights.append(Whole(config_of(watched.run.job, "actor"), watched.weights("actor")))
        self.rows.append(watched.run.feed._order.of(step))
        watched.step(step)
        (rollout,) = watched.rollouts
        prompts = watched.prompts.take(rollout.taken)
        self.steps.append((prompts, rollout))
        book.step(prompts, [rollout], [], luck)
        now, wanted = watched.weights("actor"), book.models["actor"].parameters
        furthest = max((now[n] - p).abs().max().item() for n, p in wanted.items())
        self.found.append((furthest, watched.loss("actor") - book.losses["actor"]))

    def responses(self) -> Iterator[tuple[int, Any, tuple[Tensor, ...]]]:
        """The step, prompt, tokens, log-probabilities and versions of every response that was trained on."""
        for step, (prompts, rollout) in enumerate(self.steps):
            for p, r in product(range(TAKEN), range(GROUP)):
                own = slice(int(rollout.lengths[p, r]))
                rows = (rollout.tokens, rollout.logprobs, rollout.versions)
                yield step, prompts[p], tuple(x[p, r, own] for x in rows)


def test_every_response_is_trained_on_once_or_still_under_way() -> None:
    """What a step leaves is sampled for in the next one, in the same engine and before new rows; nothing is lost."""
    found, carried = partial("rollplex"), SAMPLED - TAKEN
    trained = [
        [rows[i] for i in rollout.taken.tolist()] for rows, (_, rollout) in zip(found.rows, found.steps, strict=True)
    ]
    for before, taken, after in zip(found.rows, trained, found.rows[1:], strict=False):
        assert after[:carried] == [row for row in before if row not in taken]
    fresh = [*found.rows[0], *(row for rows in found.rows[1:] for row in rows[carried:])]
    everything = [row for rows in trained for row in rows] + [row for row in found.rows[-1] if row not in trained[-1]]
    assert sorted(everything) == sorted(fresh)
    assert len(set(fresh)) == len(fresh)


def test_a_token_keeps_the_log_probability_under_the_weights_that_sampled_it() -> None:
    """Whole-sequence passes of transformers with the weights of each token's step, in float64; carried ones in fp32."""
    found, mixed = partial("rollplex"), 0
    for step, prompt, (tokens, logprobs, versions) in found.responses():
        assert 1 <= int(versions.min()) <= int(versions.max()) <= step + 1
        assert (versions.diff() >= 0).all()
        for version in versions.unique().tolist():
            with torch.no_grad():
                wanted = found.weights[version - 1].of(prompt, tokens)
            assert (wanted - logprobs)[versions == version].abs().max() < (1e-10 if version == step + 1 else 1e-6)
        mixed += len(versions.unique()) > 1
    assert mixed > 2


def test_importance_ratios_are_to_the_recorded_log_probabilities() -> None:
    """The textbook's steps, with recorded log-probabilities as the old ones: losses and weights step by step."""
    for weights, loss in partial("rollplex").found:
        assert abs(loss) < 1e-10
        assert weights < 1e-9


def test_partial_rollout_under_serial_and_rollplex_is_identical_to_the_bit() -> None:
    assert partial("serial").digests == partial("rollplex").digests


def test_a_response_that_goes_on_is_the_one_that_would_have_been_sampled_at_once() -> None:
    """With weights that never change and dice that do not either, stopping and going on changes no token."""
    model, ends = tiny_model(), tuple(range(0, 64, 5))
    prompts = [text_prompt(6), text_prompt(9, seed=5), text_prompt(4, seed=8)]

    def decoding(which: list[int], **more: Any) -> Decoding:
        dice = [torch.Generator().manual_seed(7 + i) for i in which]
        memory = torch.full((60_000,), float("nan"), dtype=torch.float64)
        return Decoding(model, [prompts[i] for i in which], 4, 24, 0.9, dice, memory, eos=ends, **more)

    whole = decoding([0, 1, 2]).until([0, 1, 2])
    unfinished = decoding([0, 1, 2], version=1).first(1)[1]
    gone = unfinished.taken.tolist()
    again = decoding(gone, begun=unfinished, version=2).until([0, 1])
    assert torch.equal(again.tokens, whole.tokens[gone])
    torch.testing.assert_close(again.logprobs, whole.logprobs[gone], rtol=0, atol=1e-12)
    assert set(again.versions[again.mask].tolist()) == {1, 2}
    assert (unfinished.lengths < whole.lengths[gone]).any()


def test_unfinished_responses_lie_in_the_bytes_that_the_plan_has_for_them() -> None:
    """12 bytes a token, in the pinned pool; what comes out is what went in, log-probabilities in float32."""
    plan = plan_of("rollplex", mode=PARTIAL)
    assert plan.not_executable == ()
    tokens = (SAMPLED - TAKEN) * GROUP * BUDGET
    assert 12 * tokens <= plan.object("rollout.carried").bytes < 12 * tokens + 4096
    assert plan.object("rollout.carried").start == "host"
    kept = Unfinished(torch.zeros(12 * 2 * 3 * 5, dtype=torch.uint8), 2, 3, 5)
    assert kept.take() is None
    lengths = torch.tensor([[1, 5, 0], [2, 3, 4]])
    mask = torch.arange(5) < lengths[..., None]
    numbers = torch.arange(30).view(2, 3, 5)
    put = Rollout(numbers * mask, lengths, numbers / 7 * mask, torch.tensor([1, 3]), (mask * 2).to(torch.int32))
    kept.put(put)
    got = kept.take()
    assert got is not None
    assert torch.equal(got.tokens, put.tokens)
    assert torch.equal(got.lengths, put.lengths)
    assert torch.equal(got.versions, put.versions)
    assert torch.equal(got.logprobs, put.logprobs.float())


def test_rows_are_dealt_out_by_engine_and_what_an_engine_left_stays_with_it() -> None:
    """Two engines, four rows each, two taken of each: 1 and 3 are left by the first, 4 and 7 by the second."""
    job = plan_of("rollplex", mode=PARTIAL).job
    job = Job.model_validate({
        **job, "cluster": {**job["cluster"], "gpus_per_node": 2},
        "workload": {**job["workload"], "prompts": 4},
    })  # fmt: skip
    rows = StepRows(job, 100)
    first = rows.of(0)
    rows.took(0, [0, 2, 5, 6])
    second = rows.of(1)
    assert second[:2] == [first[1], first[3]]
    assert second[4:6] == [first[4], first[7]]
    assert not set(second[2:4] + second[6:]) & set(first)
    again = StepRows(job, 100)
    again.begin(1, rows.carried(1))
    assert again.of(1) == second
    rows.took(1, [0, 1, 4, 5])
    assert rows.of(1) == second
    assert rows.carried(2) == [second[2:4], second[6:]]
    with pytest.raises(AssertionError, match="what step -1 leaves is not known yet"):
        rows.of(0)  # kept are the step that runs and the next one, however long the run


def test_a_run_taken_up_from_a_checkpoint_goes_on_with_its_unfinished_responses(tmp_path: Path) -> None:
    """Two steps, a checkpoint, and two more in other engines are the bits of four; the notes survive as JSON."""
    plan = plan_of("rollplex", mode=PARTIAL)

    def begun() -> InThreads:
        run = InThreads(plan, {"reward": luck})
        run.feed._eos = OFTEN
        return run

    def after(run: InThreads, steps: range) -> dict[str, str]:
        for step in steps:
            run.step(step)
        return run.train.digests() | run.rollout.digests() | run.states[TRAIN].updates["actor"].digests()

    whole = begun()
    wanted = after(whole, range(4))
    whole.close()
    first, second = begun(), begun()
    after(first, range(2))
    assert first.rollout._unfinished is not None
    assert first.rollout._unfinished.take() is not None
    for process, state in first.states.items():
        noted = json.loads(json.dumps(keep(state, first.job, tmp_path)))
        take_up(second.states[process], second.job, tmp_path, noted)
    first.close()
    assert after(second, range(2, 4)) == wanted
    second.close()
