"""Host functions before the rollout, and calls that are not split, run: each step is that of a textbook trainer.

weight = host(prompts)                    before decode            retold = host(prompts, rollout)        behind it
given  = host(prompts) -> rollout         reference on it: P1      reference or actor behind it: whole, P2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from algorithm_runs import ENDS, job_of
from algorithms import made
from runtime_threads import TRAIN, InThreads
from runtime_tiny import luck
from textbook import Whole
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.data.rows import Row
from rollplex.backends.training.placement import config_of, views
from rollplex.ir.errors import DataError, RollplexError, RunError
from rollplex.ir.plan import Plan
from rollplex.ir.spec import Part
from rollplex.ir.steps import Run
from rollplex.passes.pipeline import compile_plan
from rollplex.runtime.preflight import check_hosts, check_plan

torch.set_num_threads(1)
SIGNATURE = "prompts, *, actor, reference, reward, other, n=3"
WEIGHTED = """\
weight = rx.host(other)(prompts)
rollout = actor.generate(prompts, n=n)
ref_logp = reference.logprobs(prompts, rollout)
logp = actor.logprobs(prompts, rollout)
score = rx.host(reward)(prompts, rollout)
actor.update(rx.masked_mean((logp - ref_logp) * score * weight, rollout.mask))
"""
RETOLD = """\
rollout = actor.generate(prompts, n=n)
retold = rx.host(other, returns="sample_prompts")(prompts, rollout)
ref_logp = reference.logprobs(retold, rollout)
logp = actor.logprobs(prompts, rollout)
score = rx.host(reward)(prompts, rollout)
actor.update(rx.masked_mean((logp - ref_logp) * (logp - ref_logp) * score, rollout.mask))
"""
GIVEN = """\
given = rx.host(other, returns="rollout")(prompts)
ref_logp = reference.logprobs(prompts, given)
rollout = actor.generate(prompts, n=n)
logp = actor.logprobs(prompts, rollout)
score = rx.host(reward)(prompts, rollout)
actor.update(rx.masked_mean(logp * (score - rx.sequence_mean(ref_logp, given.mask)), rollout.mask))
"""
TRAINED = """\
rollout = actor.generate(prompts, n=n)
retold = rx.host(other, returns="sample_prompts")(prompts, rollout)
ref_logp = reference.logprobs(prompts, rollout)
logp = actor.logprobs(retold, rollout)
score = rx.host(reward)(prompts, rollout)
actor.update(rx.masked_mean((logp - ref_logp) * score, rollout.mask))
"""
EDITED = """\
rollout = actor.generate(prompts, n=n)
edited = rx.host(other, returns="rollout")(prompts, rollout)
ref_logp = reference.logprobs(prompts, edited)
logp = actor.logprobs(prompts, rollout)
score = rx.host(reward)(prompts, rollout)
actor.update(rx.masked_mean(logp * (score - rx.sequence_mean(ref_logp, edited.mask)), rollout.mask))
"""
ASKED = """\
asked = rx.host(other, returns="prompts")(prompts)
rollout = actor.generate(asked, n=n)
ref_logp = reference.logprobs(asked, rollout)
logp = actor.logprobs(asked, rollout)
score = rx.host(reward)(asked, rollout)
actor.update(rx.masked_mean((logp - ref_logp) * score, rollout.mask))
"""


def weight(question: str, index: int) -> float:
    return 1 + len(question) % 3 + index


def weigh(question: str, index: int) -> float:
    """Another for almost every question."""
    return 1 + sum(map(ord, question)) % 7 + index


def retell(question: str, tokens: list[int]) -> str:
    return question + "?" * (1 + sum(tokens) % 3)


def give(index: int) -> str:
    return "abcdefg"[: 2 + 2 * index]


def edit(tokens: list[int]) -> str:
    return "xyz"[: 1 + sum(tokens) % 3]


def ask(question: str) -> str:
    return question[::-1]


CASES: dict[str, tuple[str, Callable[..., Any]]] = {
    "weighted": (WEIGHTED, weigh),
    "retold": (RETOLD, retell),
    "given": (GIVEN, give),
    "trained": (TRAINED, retell),
    "edited": (EDITED, edit),
    "asked": (ASKED, ask),
}


def plan_of(name: str, body: str = "", **changes: Any) -> Plan:
    folder = Path(mkdtemp(prefix="rollplex-test-"))
    return compile_plan(made(folder, body or CASES[name][0], SIGNATURE), job_of("grpo", **changes))


def run_of(plan: Plan, function: Callable[..., Any]) -> InThreads:
    run = InThreads(plan, {"reward": luck, "other": function})
    run.feed._eos = ENDS
    return run


# ---- the textbook


def prompt_of(run: InThreads, step: int, p: int, text: str) -> Prompt:
    return run.feed._prompt(replace(run.feed.rows_of(step)[p], question=text))


def text_tokens(run: InThreads, text: str) -> Tensor:
    tokenizer = run.feed.maker.tokenizer
    return torch.tensor([*tokenizer.encode(text), tokenizer.eos_token_id])


def terms(name: str, run: InThreads, step: int, models: Mapping[str, Whole], values: dict[str, Any]) -> list[Tensor]:
    """One response's part of the sum over tokens, and how many tokens it has."""
    rollout: Rollout = values["rollout"]
    actor, reference, found = models["actor"], models["reference"], []
    for p, prompt in enumerate(values["prompts"]):
        for r, response in enumerate(rollout.responses(p)):
            score = luck(response.tolist())
            asked = {"question": prompt.question, "tokens": response.tolist(), "index": r}
            function = CASES[name][1]
            made = function(**{k: asked[k] for k in function.__code__.co_varnames[: function.__code__.co_argcount]})
            told = prompt_of(run, step, p, made) if name in ("retold", "trained", "asked") else prompt
            logp = actor.of(told if name in ("trained", "asked") else prompt, response)
            if name in ("given", "edited"):
                mean = reference.of(prompt, text_tokens(run, made)).detach().mean()
                found.append(logp * (score - mean))
                continue
            delta = logp - reference.of(told if name in ("retold", "asked") else prompt, response).detach()
            found.append(delta * delta * score if name == "retold" else delta * score)
            if name == "weighted":
                found[-1] = found[-1] * made
    return found


def weights_now(run: InThreads, role: str) -> dict[str, Tensor]:
    train = run.train
    objects = train._replicas[role].objects
    parts: dict[Part, Tensor] = {p: train.objects.current(o, train.dtype) for p, o in objects.items()}
    return {n: w.clone() for n, w in views(parts, run.job, role).items()}


@pytest.mark.parametrize(("name", "recompute"), [*((name, "none") for name in CASES), ("trained", "full")])
def test_two_steps_are_those_of_whole_sequences_and_torch(name: str, recompute: str) -> None:
    roles = job_of("grpo").model_dump()["roles"]
    roles["actor"] |= {"recompute": recompute}
    steps_are_those_of_whole_sequences(run_of(plan_of(name, roles=roles), CASES[name][1]), 2, name)


def steps_are_those_of_whole_sequences(
    run: InThreads, steps: int, name: str = "weighted"
) -> list[tuple[list[Row], list[int]]]:
    """Loss, norm and weights of each step; the rows that each sampled for and the numbers of those it took."""
    seen: list[tuple[list[Row], list[int]]] = []
    models = {role: Whole(config_of(run.job, role), weights_now(run, role)) for role in run.job.roles}
    o, parameters = run.job.optimizer, models["actor"].parameters
    adam = torch.optim.AdamW(parameters.values(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)
    for k in range(steps):
        run.step(k)
        adam.zero_grad()
        values = run.states[TRAIN].values
        seen.append((run.feed.rows_of(k), values["rollout"].taken.tolist()))
        taken = {**values, "prompts": values["prompts"].take(values["rollout"].taken)}
        loss = torch.cat(terms(name, run, k, models, taken)).mean()
        loss.backward()
        norm = float(clip_grad_norm_(parameters.values(), o.clip_norm or 0.0))
        adam.step()
        assert run.train._losses["actor"].total == pytest.approx(float(loss.detach()), abs=1e-10)
        assert run.states[TRAIN].updates["actor"].metrics["grad_norm"] == pytest.approx(norm, abs=1e-10)
        assert norm > 1e-3
        now = weights_now(run, "actor")
        assert max((now[n] - p).abs().max().item() for n, p in parameters.items()) < 1e-10
    run.close()
    return seen


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_takes_the_same_steps_to_the_bit(name: str) -> None:
    found = []
    for schedule in ("serial", "rollplex", "streamed"):
        run = run_of(plan_of(name, schedule=schedule, model={"dtype": "float32"}), CASES[name][1])
        for k in range(2):
            run.step(k)
        found.append(run.train.digests() | run.states[TRAIN].updates["actor"].digests() | run.rollout.digests())
        run.close()
    assert found[0] == found[1] == found[2]


def test_where_each_runs() -> None:
    """What needs no response comes before decode; what needs one has a window of its own behind the barrier."""
    early = [s for s in plan_of("given").programs["train"] if isinstance(s, Run) and s.task == "whole"]
    late = [s for s in plan_of("retold").programs["train"] if isinstance(s, Run) and s.task == "whole"]
    assert {s.window for s in early} == {"P1 score-reference"}
    assert {s.window for s in late} == {"P2 score-reference"}
    assert all(plan_of(name).not_executable == () for name in CASES)
    for name in CASES:
        check_plan(plan_of(name))


# ---- what is refused


def test_what_a_host_function_cannot_take_or_make_is_refused() -> None:
    def asks(response: str) -> float:
        return 0.0

    hosts = {"reward": luck, "other": asks}
    with pytest.raises(RunError, match=r"`other` takes response, there is no response when it runs\n.*question"):
        check_hosts(plan_of("weighted"), hosts)
    early = """\
    told = rx.host(other, returns="sample_prompts")(prompts)
    rollout = actor.generate(prompts, n=n)
    ref_logp = reference.logprobs(told, rollout)
    logp = actor.logprobs(prompts, rollout)
    score = rx.host(reward)(prompts, rollout)
    actor.update(rx.masked_mean((logp - ref_logp) * score, rollout.mask))
    """
    with pytest.raises(RunError, match=r"`other` returns sample_prompts before the rollout\n.*scores, prompts"):
        check_hosts(plan_of("", early), {**hosts, "other": weight})


@pytest.mark.parametrize(
    ("name", "says", "error", "message"),
    [
        ("given", lambda: "x" * 20, DataError, r"train.jsonl:\d+, 0: the response has 21 tokens, the plan allows 10"),
        ("given", lambda: 3, RunError, r"`other` returned 3, not a text"),
        ("retold", lambda: "x" * 200, DataError, r"the prompt has \d+ tokens, the plan allows 128"),
        ("weighted", lambda: 1 / 0, RunError, r"`other` raised ZeroDivisionError"),
    ],
)
def test_a_host_function_that_makes_what_cannot_be_is_told_with_its_row(
    name: str, says: Callable[..., Any], error: type[RollplexError], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_of(plan_of(name), says).step(0)


OVERSAMPLED = {"rollout": {"kind": "oversample", "factor": 2}, "group": 3, "response_tokens": 10}


STEPS = 6
PARTIAL = {"rollout": {"kind": "partial", "share": 0.5}, "group": 3, "response_tokens": 10}


@pytest.mark.parametrize("schedule", ["serial", "rollplex"])
@pytest.mark.parametrize("workload", [OVERSAMPLED, PARTIAL], ids=["oversample", "partial"])
def test_numbers_made_before_the_rollout_are_those_of_the_prompts_that_a_step_takes(
    schedule: str, workload: dict[str, Any]
) -> None:
    """Of four prompts the first two to complete: the others' weights are not in the loss."""
    run = run_of(plan_of("weighted", schedule=schedule, workload=workload), weigh)
    steps = steps_are_those_of_whole_sequences(run, STEPS)
    weights = [([weigh(row.question, 0) for row in rows], numbers) for rows, numbers in steps]
    assert [[w[n] for n in numbers] for w, numbers in weights] != [w[: len(numbers)] for w, numbers in weights]
    assert run.feed.metrics["other"] == pytest.approx(sum(weights[-1][0]) / 4 + 1)


DIVIDED = WEIGHTED.replace(
    "rx.masked_mean((logp - ref_logp) * score * weight, rollout.mask)",
    "rx.masked_sum((logp - ref_logp) * score, rollout.mask) / weight.sum()",
)


@pytest.mark.parametrize(
    ("name", "body", "host", "workload"),
    [
        ("given", GIVEN, "given", OVERSAMPLED),
        ("asked", ASKED, "asked", OVERSAMPLED),
        ("weighted", DIVIDED, "weight", OVERSAMPLED),
    ],
    ids=["responses", "prompts", "a divisor of numbers alone"],
)
def test_a_choice_among_sampled_prompts_and_what_is_made_of_them_before_do_not_go_together(
    name: str, body: str, host: str, workload: dict[str, Any]
) -> None:
    found = plan_of(name, body, workload=workload).not_executable
    assert found == (f"host function %{host} runs before it is known which prompts a step takes",)


def test_megatron_does_not_run_whole_calls() -> None:
    megatron = {"train": {"engine": "megatron"}}
    roles = job_of("grpo").model_dump()["roles"]
    roles |= {"actor": roles["actor"] | megatron, "reference": {"score": {"engine": "megatron"}}}
    found = plan_of("retold", roles=roles).not_executable
    assert found == ("reference's call %ref_logp is not split: megatron goes on from a prefix",)
