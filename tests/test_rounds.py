"""Dynamic sampling as it runs: groups that teach nothing are sampled again, and everything else stays as it was.

prompts of the step      0   1   2   3
round 1        kept:     x   .   x   .        rows 5 0 3 8 of the data
round 2                      .       x               2   7     in place of rows 0 and 8
round 3, the last            x                       1         beside the prefixes of all four
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import algorithm_runs
import pytest
import torch
from algorithm_runs import ENDS, Watched, job_of, plan_of
from rich.console import Console
from runtime_threads import InThreads
from textbook import Textbook
from torch import Tensor

from rollplex.backends.data.batch import PromptBatch
from rollplex.ir.errors import GraphError, RunError
from rollplex.ir.job import Job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run, Step
from rollplex.passes.pipeline import compile_plan
from rollplex.runtime.carrying import keep, take_up
from rollplex.runtime.gathering import seen_by
from rollplex.runtime.printing import print_report
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.report import Report
from rollplex.runtime.run import run_plan
from rollplex.runtime.sampling import sampled_groups
from rollplex.runtime.steprows import RoundRows

torch.set_num_threads(1)
PROMPTS, GROUP, BUDGET, STEPS = 4, 3, 8, 3
LOAD = {"prompts": PROMPTS, "group": GROUP, "response_tokens": BUDGET}


def seldom(tokens: list[int]) -> float:
    """1 for a response in seven: two groups in three are alike, and two rounds are not enough."""
    return float(sum(tokens) % 7 == 0)


def never(tokens: list[int]) -> float:
    return 0.0


def plan_in(rounds: int = 8, when_short: str = "fill", **changes: Any) -> Plan:
    again = {"rounds": rounds, "kept": 0.6}
    return plan_of("dapo", workload={**LOAD, "dynamic_sampling": again}, run={"when_short": when_short}, **changes)


@pytest.fixture(autouse=True)
def _seldom_rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(algorithm_runs.HOSTS, "reward", seldom)


# ---- a trainer that samples again by itself


def scattered(seed: int, number: int) -> int:
    """splitmix64, as its author has it: what an iteration, a prompt and a later round make of a seed."""
    state = (seed + (number + 1) * 0x9E3779B97F4A7C15) & (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ state >> shift) * factor & (1 << 64) - 1
    return (state ^ state >> 31) & (1 << 63) - 1


class Responses:
    """Responses by prompt, as the textbook reads them."""

    def __init__(self, tokens: list[list[Tensor]]) -> None:
        self.tokens = tokens

    def responses(self, prompt: int) -> list[Tensor]:
        return self.tokens[prompt]


class Resampler:
    """Draws rows, samples token by token with whole sequences, and goes on until every group has two scores."""

    def __init__(self, run: InThreads, book: Textbook, rounds: int) -> None:
        self.run, self.book, self.rounds = run, book, rounds
        self.seed, self.count = run.job.run.seed, len(run.feed.rows)
        self.drawn = 0
        self.used: list[int] = []
        self.short: list[int] = []

    def step(self, k: int) -> tuple[list[int], list[Any], Responses]:
        """Rows, prompts and responses of a step."""
        rows, found, wanting = [0] * PROMPTS, [[torch.empty(0)]] * PROMPTS, list(range(PROMPTS))
        made: list[Any] = [None] * PROMPTS
        for r in range(self.rounds):
            self.used += [r] if wanting else []
            for p in wanting:
                rows[p] = self._row()
                made[p] = self.run.feed.maker(self.run.feed.rows[rows[p]])
                found[p] = self._sample(made[p], k, p, r)
            wanting = [p for p in wanting if len({seldom(t.tolist()) for t in found[p]}) == 1]
        self.short.append(len(wanting))
        return rows, made, Responses(found)

    def _row(self) -> int:
        epoch, at = divmod(self.drawn, self.count)
        self.drawn += 1
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return int(torch.randperm(self.count, generator=generator)[at])

    @torch.no_grad()
    def _sample(self, prompt: Any, k: int, p: int, r: int) -> list[Tensor]:
        seed = scattered(scattered(self.seed, k), p)
        generator = torch.Generator().manual_seed(scattered(seed, r) if r else seed)
        thrown, model = torch.rand(GROUP, BUDGET, generator=generator, dtype=torch.float64), self.book.models["actor"]
        found = []
        for row in thrown:
            tokens: list[int] = []
            while len(tokens) < BUDGET and not (tokens and tokens[-1] in ENDS):
                hidden = model.hidden(prompt, torch.tensor(tokens, dtype=torch.int64))[-1]
                summed = model.model.lm_head(hidden).softmax(-1).cumsum(-1)
                tokens.append(int((summed <= row[len(tokens)] * summed[-1]).sum()))
            found.append(torch.tensor(tokens))
        return found


@pytest.mark.parametrize("rounds", [8, 2])
def test_three_steps_are_those_of_a_trainer_that_samples_again_by_itself(rounds: int) -> None:
    """The same rows, tokens, loss, norm and weights; of groups that stay alike after the last round, too."""
    watched = Watched(plan_in(rounds))
    book = watched.textbook("dapo")
    other = Resampler(watched.run, book, rounds)
    for k in range(STEPS):
        watched.step(k)
        rows, prompts, responses = other.step(k)
        assert watched.run.feed.rows_of(k) == [watched.run.feed.rows[row] for row in rows]
        (rollout,) = watched.rollouts
        for p in range(PROMPTS):
            assert [t.tolist() for t in rollout.responses(p)] == [t.tolist() for t in responses.responses(p)]
        book.step(prompts, [responses], [], seldom)
        assert watched.loss("actor") == pytest.approx(book.losses["actor"], abs=1e-10)
        assert watched.norm("actor") == pytest.approx(book.norms["actor"], abs=1e-10)
        now = watched.weights("actor")
        assert max((now[n] - w).abs().max().item() for n, w in book.models["actor"].parameters.items()) < 1e-10
        assert watched.run.feed.metrics["groups_short"] == other.short[-1]
    assert max(other.used) == min(rounds - 1, 2)
    assert (sum(other.short) > 0) == (rounds == 2)
    watched.run.close()


# ---- the same bits


@cache
def digests(schedule: str, steps: int = STEPS) -> tuple[dict[str, str], tuple[dict[str, float], ...]]:
    watched, metrics = Watched(plan_in(schedule=schedule, model={"dtype": "float32"})), []
    for k in range(steps):
        watched.step(k)
        metrics.append(dict(watched.run.feed.metrics))
    found = watched.digests()
    watched.run.close()
    return found, tuple(metrics)


def test_serial_and_rollplex_take_the_same_rounds_and_steps_to_the_bit() -> None:
    assert digests("serial") == digests("rollplex")
    assert {row["rounds"] for row in digests("serial")[1]} != {1.0}


def test_a_run_taken_up_behind_a_step_of_several_rounds_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Rows, too, go on where the rounds have left them; the notes survive as JSON."""
    plan = plan_in(model={"dtype": "float32"})
    first, second = Watched(plan), Watched(plan)
    first.step(0)
    assert digests("rollplex")[1][0]["rounds"] > 1
    for process, state in first.run.states.items():
        noted = json.loads(json.dumps(keep(state, first.run.job, tmp_path)))
        take_up(second.run.states[process], second.run.job, tmp_path, noted)
    first.run.close()
    second.step(1)
    second.step(2)
    assert second.digests() == digests("rollplex")[0]
    second.run.close()


def test_two_gpus_sample_again_for_their_own_prompts_and_take_the_steps_of_one(tmp_path: Path) -> None:
    """Processes, float64: each engine's rounds are for the prompts that are its own, whatever the other's need."""
    plan = plan_in(cluster={"gpus_per_node": 2, "capacity_gib": "64 MiB"})
    report = run_plan(plan, hosts={"reward": seldom}, out_dir=tmp_path / "run").report
    one = Watched(plan_in(), ends=None)
    for k, two in enumerate(report.metrics):
        one.step(k)
        counted = dict(one.run.feed.metrics)
        assert {name: two[name] for name in counted} == counted
        assert one.loss("actor") == pytest.approx(two["loss"], abs=1e-10)
        assert one.norm("actor") == pytest.approx(two["grad_norm"], abs=1e-10)
    one.run.close()
    rounds = [row["rounds"] for row in report.metrics]
    assert (len(rounds), max(rounds) > 1, report.memory_as_planned) == (2, True, True)
    told = json.loads((tmp_path / "run" / "report.json").read_text())["sampling"]
    sampled = sum(row["groups_sampled"] for row in report.metrics)
    assert (told["guessed_share"], told["kept_share"]) == (0.6, 2 * PROMPTS / sampled)


# ---- what runs beside what


def test_prefixes_run_when_it_is_known_which_prompts_the_last_round_has() -> None:
    """load 0 < generate 0 < .. < load 7 < prefixes: none runs beside an earlier round, all of them beside the last."""
    plan, seen = plan_in(), list[tuple[str, int]]()

    def look(process: ProcessId, step: Step) -> None:
        if isinstance(step, Run) and step.task in ("load", "prefix"):
            seen.append((step.task, step.microbatch))

    run = InThreads(plan, {"reward": seldom}, look)
    run.feed._eos = ENDS
    run.step(0)
    run.close()
    assert seen == [*(("load", r) for r in range(8)), *(("prefix", m) for m in range(PROMPTS))]
    windows = {s.window for s in plan.programs["train"] if isinstance(s, Run) and s.task == "prefix"}
    assert windows == {"P1 prefix-actor"}
    last = next(s for s in plan.programs["rollout"] if isinstance(s, Run) and s.microbatch == 7)
    assert (last.window, last.outputs) == ("P1 prefix-actor", ("rollout",))


def test_a_round_that_nothing_is_left_for_samples_and_scores_nothing() -> None:
    """With two scores in every group one round is enough: the reward is called once a response."""
    called: list[int] = []

    def apart(tokens: list[int], index: int) -> float:
        called.append(index)
        return float(index)

    run = InThreads(plan_in(), {"reward": apart})
    run.step(0)
    assert len(called) == PROMPTS * GROUP
    expected = {"rounds": 1.0, "groups_sampled": 4.0, "groups_kept": 4.0, "groups_short": 0.0, "kept_share": 1.0}
    assert {name: run.feed.metrics[name] for name in expected} == expected
    assert run.feed.metrics["reward"] == run.feed.metrics["reward_sampled"] == 1.0
    run.close()


def test_a_rollout_rank_gets_the_patches_of_the_prompts_that_are_due() -> None:
    """The others' responses it has; a training rank gets those of all its prompts."""
    job = job_of("dapo", workload=LOAD)
    feed = InThreads(plan_in(), {"reward": seldom})
    prompts = feed.feed._batch(0)
    feed.close()
    due = replace(prompts, due=frozenset({1, 3}))
    rollout, train = (
        seen_by(job, ProcessId(kind, 0), {"prompts": due, "x": 1})["prompts"] for kind in ("rollout", "train")
    )
    assert [p.pixel_values is not None for p in rollout] == [False, True, False, True]
    assert [p.pixel_values is not None for p in train] == [True] * 4
    assert isinstance(rollout, PromptBatch)
    assert rollout.sampled_for(range(2)) == [1]


# ---- the last round


def test_a_step_of_groups_that_teach_nothing_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(algorithm_runs.HOSTS, "reward", never)
    watched = Watched(plan_in(2))
    watched.step(0)
    assert (watched.loss("actor"), watched.norm("actor")) == (0.0, 0.0)
    watched.run.close()


def test_a_step_that_is_short_ends_the_run_where_the_job_says_stop() -> None:
    """Counts, the line of the mask, and what to try."""
    run = InThreads(plan_in(2, "stop"), {"reward": never})
    message = (
        r"step 1, workload\.dynamic_sampling: 4 of 4 prompt groups still teach nothing after 2 rounds \(8 groups "
        r"sampled, 0 kept\): the loss's mask, .*dapo\.py:24, keeps no token of the others\n"
        r"    try: raise workload\.dynamic_sampling\.rounds, or give run\.data whose prompts are neither"
    )
    with pytest.raises(RunError, match=message):
        run.step(0)


def test_a_reward_that_raises_in_the_second_round_names_it() -> None:
    calls: list[int] = []

    def fails_later(tokens: list[int]) -> float:
        calls.append(1)
        if len(calls) > PROMPTS * GROUP:
            raise KeyError("answer")
        return 0.0

    run = InThreads(plan_in(), {"reward": fails_later})
    with pytest.raises(RunError, match=r"train\.jsonl:\d+, response \d, round 2: `reward` raised KeyError: 'answer'"):
        run.step(0)


def test_the_report_sets_the_share_kept_beside_the_jobs_guess() -> None:
    """4 of 8 and 3 of 12 groups; the second step is one short."""
    job = Job.model_validate(plan_in().job)
    counts = [(2.0, 8.0, 4.0, 0.0), (3.0, 12.0, 3.0, 1.0)]
    names = ("rounds", "groups_sampled", "groups_kept", "groups_short")
    found = sampled_groups(job, [dict(zip(names, row, strict=True)) for row in counts])
    assert found is not None
    assert (found.rounds, found.groups, found.kept_share, found.guessed_share) == (2.5, 10.0, 7 / 20, 0.6)
    assert (found.short_steps, found.short_groups) == (1, 1)
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_report(Report("dapo", "rollplex", 2, steps_done=2, sampling=found), console)
    text = console.export_text()
    assert "rounds     2.5 a step for 4 groups, 10.0 sampled; 35% kept (the job guesses 60%)" in text
    assert "1 of 2 steps are short: 1 groups that teach nothing" in text
    assert sampled_groups(job_of("dapo"), [{}]) is None


# ---- rows


def test_the_next_step_begins_behind_the_last_row_that_was_drawn() -> None:
    """0 1 2 3, then 4 and 5 for the second and fourth, 6 for the second again; step 1 begins at 7."""
    job = Job.model_validate(plan_in().job)
    rows, order = RoundRows(job, 100), RoundRows(job, 100).of(0)
    assert rows.of(0) == order
    later = [rows.again(0, [1, 3]), rows.again(0, [1])]
    assert rows.of(0) == [order[0], later[1][0], order[2], later[0][1]]
    assert rows.carried(1) == 7
    again = RoundRows(job, 100)
    again.begin(1, 7)
    assert rows.of(1) == again.of(1)
    assert not set(rows.of(1)) & {*order, *later[0], *later[1]}
    assert rows.of(0) == [order[0], later[1][0], order[2], later[0][1]]  # a later host function may still ask


# ---- what says nothing of groups


def compiled(text: str, tmp_path: Path) -> Plan:
    source = Path("examples/dapo.py").read_text(encoding="utf-8")
    assert "rollout.mask & informative" in source
    path = tmp_path / "algorithm.py"
    path.write_text(source.replace("rx.masked_mean(-policy, rollout.mask & informative)", text), encoding="utf-8")
    return compile_plan(load_algorithm(path), Job.model_validate(plan_in().job))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("rx.masked_mean(-policy, rollout.mask)", r"its mask %\w+ leaves no group out: it is made of no host function"),
        ("(-policy * informative).sum()", r"the loss of `actor` has no mask\n    try: leave groups out of the loss"),
        (
            "rx.masked_mean(-policy, rollout.mask & informative) + rx.masked_mean(logp, rollout.mask)",
            r"the loss of `actor` has 2 masks: %\w+, %\w+",
        ),
        (
            "rx.masked_mean(-policy, rollout.mask & (correct > correct.mean()).unsqueeze(-1))",
            r"mixes the prompts of a step in %\w+: what it says of a group changes by round",
        ),
    ],
)
def test_a_loss_that_does_not_say_which_groups_teach_nothing_is_refused(
    loss: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(GraphError, match=message):
        compiled(loss, tmp_path)


def test_rounds_are_what_the_plan_has_of_each() -> None:
    """A load, a decode and a judgement for each round; nothing else is done more than once."""
    plan = plan_in(5)
    assert plan.not_executable == ()
    assert plan.summary.rounds is not None
    assert plan.summary.rounds.most == 5
    for process, task in (("controller", "load"), ("controller", "host"), ("rollout", "generate")):
        runs = [s for s in plan.programs[process] if isinstance(s, Run) and s.task == task]
        assert [s.microbatch for s in runs] == list(range(5))
    once = plan_of("dapo", workload=LOAD)
    assert plan.summary.peak_hbm_bytes == once.summary.peak_hbm_bytes
    assert len(plan.programs["train"]) == len(once.programs["train"])
