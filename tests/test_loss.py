"""A loss computed prompt group by prompt group has the value and the gradients of the whole batch, from data alone."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from algorithms import START, grpo, made, split, step_values, typed
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_tiny import megatron_plan
from runtime_tiny import tiny_plan
from torch import Tensor

from rollplex.backends.collectives import Groups
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.training.loss import Scores
from rollplex.ir.dsl import Algorithm
from rollplex.ir.errors import PlanError
from rollplex.ir.grouploss import group_loss, row_values, wide_values
from rollplex.ir.job import Job
from rollplex.ir.loss import split_loss
from rollplex.ir.placement import training_seat
from rollplex.ir.plan import LossPlan, NodeRecord, Plan
from rollplex.ir.records import evaluate, to_records
from rollplex.ir.torch_ops import TORCH_OPS

torch.set_num_threads(1)
PROMPTS, GROUP, LENGTH = 5, 8, 6

LOSSES = {
    "grpo with a mean for each sequence": """
        ratio = torch.exp(logp - rollout.logprobs)
        a = rx.group_normalize(score, n)
        per_sequence = (torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a) * rollout.mask).sum(-1) / rollout.lengths
        actor.update(-per_sequence.mean())
        """,
    "a ratio for each sequence (GSPO)": """
        gap = ((logp - rollout.logprobs) * rollout.mask).sum(-1) / rollout.lengths
        loss = -(torch.exp(gap) * (score - score.mean(-1))).mean()
        actor.update(loss)
        """,
    "advantages normalised over the step": """
        a = (score - score.mean()) / (score.std() + 1e-6)
        actor.update(rx.masked_mean(-logp * a, rollout.mask))
        """,
    "a sum of means, scaled, with a constant": """
        kl = rx.masked_mean((logp - rollout.logprobs) ** 2, rollout.mask)
        policy = -rx.masked_sum(logp * score, rollout.mask) / rollout.mask.sum()
        actor.update(2 * policy + kl * score.mean() - 0.25)
        """,
    "sums over prompts first": """
        actor.update((logp * rollout.mask).sum(0).sum(1).mean() / 7 - score.mean())
        """,
    "statistics within a group": """
        x = (logp * rollout.mask).sum(-1)
        x = (x - x.mean(1)) / (x.std(1) + 0.1)
        actor.update((x * score).sum() * 0.01)
        """,
    "a constant minus a mean": """
        actor.update(1 - rx.masked_mean(torch.exp(logp) * score, rollout.mask))
        """,
    "a detached factor of the forward": """
        actor.update(rx.masked_mean(-logp * torch.exp(logp - rollout.logprobs).detach() * score, rollout.mask))
        """,
}


def whole_batch(algorithm: Algorithm, env: dict[str, Any]) -> tuple[float, Tensor]:
    """Loss and gradient of the log-probabilities, from one evaluation of all prompts."""
    graph = typed(algorithm).graph
    logp = env["logp"].clone().requires_grad_()
    loss_name = split_loss(graph).loss
    loss = evaluate(to_records(graph), {**env, "logp": logp}, [loss_name])[loss_name]
    loss.backward()
    assert logp.grad is not None
    return loss.item(), logp.grad


def by_group(plan: LossPlan, env: dict[str, Any], ranks: int = 1) -> tuple[float, Tensor]:
    """The same, one prompt group after the other, the prompts spread over ranks that see only their own."""
    wide = wide_values(plan, {name: env[name] for name in plan.wide_inputs})
    total, gradient = 0.0, torch.zeros_like(env["logp"])
    for mine in torch.arange(PROMPTS).chunk(ranks):
        local = {"rollout": {k: v[mine] for k, v in env["rollout"].items()}}
        local |= {k: env[k][mine] for k in ("score", "ref_logp")}
        rows = row_values(plan, local, wide)
        for group, prompt in enumerate(mine.tolist()):
            logp = env["logp"][prompt : prompt + 1].clone().requires_grad_()
            loss = group_loss(plan, rows, {"logp": logp}, group)
            loss.backward()
            assert logp.grad is not None
            total += loss.item()
            gradient[prompt] = logp.grad[0]
    return total, gradient


def assert_separable(algorithm: Algorithm, ranks: int) -> None:
    env = step_values(PROMPTS, GROUP, LENGTH)
    plan = LossPlan.model_validate_json(split_loss(split(algorithm).graph).model_dump_json())
    loss, gradient = whole_batch(algorithm, env)
    found, parts = by_group(plan, env, ranks)
    assert gradient.abs().max() > 0
    assert (parts - gradient).abs().max() < 1e-12
    assert found == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_grpo_by_group(ranks):
    assert_separable(grpo(), ranks)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_by_group(tmp_path, name, ranks):
    assert_separable(made(tmp_path, START + dedent(LOSSES[name])), ranks)


ROWS = [
    "torch.exp({})",
    "{} * score",
    "{} - rollout.logprobs",
    "{}.clamp(-1, 0.5)",
    "rx.group_normalize({}, n)",
    "{} * logp",
]
ENDS = ["rx.masked_mean({}, rollout.mask)", "({} * rollout.mask).sum()", "{}.mean()", "rx.masked_sum({}, rollout.mask)"]
AFTER = ["-({})", "2 * ({})", "({}) / rollout.mask.sum()", "({}) + score.mean()", "3 - ({})", "({}) * score.std()"]


@settings(max_examples=40, deadline=None)
@given(
    # exp of exp overflows, and nan equals nothing.
    st.lists(st.sampled_from(ROWS), max_size=4).filter(lambda rows: sum("exp" in r for r in rows) <= 1),
    st.lists(st.sampled_from(ENDS), min_size=1, max_size=2),
    st.lists(st.sampled_from(AFTER), max_size=4),
)
def test_random_losses_by_group(rows, ends, after):
    """rows of a group -> one or two sums over groups -> linear maths."""
    expression = "logp"
    for form in rows:
        expression = form.format(expression)
    loss = " + ".join(end.format(f"({expression})") for end in ends)
    for form in after:
        loss = form.format(loss)
    with tempfile.TemporaryDirectory() as folder:
        algorithm = made(Path(folder), START + f"loss = {loss}\nactor.update(loss)\n")
        env = step_values(PROMPTS, GROUP, LENGTH)
        value, gradient = whole_batch(algorithm, env)
        found, parts = by_group(split_loss(typed(algorithm).graph), env)
    assert (parts - gradient).abs().max() <= 1e-11 * max(1.0, gradient.abs().max().item())
    assert found == pytest.approx(value, rel=1e-10, abs=1e-11)


def test_the_plan_of_grpo_says_what_is_shared_and_what_is_cut():
    plan = split_loss(split(grpo()).graph)
    assert plan.forward == ("logp",)
    assert plan.wide == ("rollout_mask.count",)
    assert plan.wide_inputs == ("rollout",)
    assert set(plan.sliced) == {"rollout_logprobs", "advantage_wide", "ref_logp", "rollout_mask"}
    assert plan.whole == ("rollout_mask.count",)
    assert not {r.op for r in plan.group} & {"rx.masked_mean", "rx.host", "rx.suffix"}


# ------------------------------------------------------------------------------------------ the interpreter of plans


def test_records_of_grpo_compute_its_formula():
    """Against the formula of the paper, written out on plain tensors."""
    env = step_values(PROMPTS, GROUP, LENGTH)
    old, mask = env["rollout"]["logprobs"], env["rollout"]["mask"]
    a = (env["score"] - env["score"].mean(1, keepdim=True)) / (env["score"].std(1, keepdim=True) + 1e-6)
    ratio = (env["logp"] - old).exp()
    policy = torch.minimum(ratio * a[..., None], ratio.clamp(0.8, 1.2) * a[..., None])
    delta = env["ref_logp"] - env["logp"]
    per_token = -policy + 0.04 * (delta.exp() - delta - 1)
    expected = sum(per_token[mask].tolist()) / int(mask.sum())
    records = [NodeRecord.model_validate(json.loads(r.model_dump_json())) for r in to_records(typed(grpo()).graph)]
    assert evaluate(records, env, ["loss"])["loss"].item() == pytest.approx(expected, abs=1e-12)


def test_only_what_is_wanted_is_computed():
    env = step_values(PROMPTS, GROUP, LENGTH)
    records = to_records(typed(grpo()).graph)
    assert set(evaluate(records, {"score": env["score"]}, ["advantage"])) == {"advantage"}


def record(op: str, *args: Any) -> NodeRecord:
    return NodeRecord(name="x", op=op, args=args, loc="a.py:3")


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([record("os.system", "true")], r"a.py:3: %x = os.system is not tensor maths"),
        ([record("torch.load", "file")], r"%x = torch.load is not tensor maths"),
        ([record("Tensor.__class__", {"ref": "t"})], r"is not tensor maths"),
        ([record("rx.host", "os:system", {"ref": "t"})], r"a model or a host call must have run before"),
        ([record("rx.generate", "actor", {"ref": "t"})], r"its value is not given"),
        ([record("torch.exp", {"ref": "y"})], r"%x reads y, which comes later or not at all"),
        ([record("torch.exp", {"call": "t"})], r"not an argument of an op"),
        ([record("Tensor.to", {"ref": "t"}, {"dtype": "os"})], r"not an argument of an op"),
        ([], r"no value or record named x"),
    ],
)
def test_the_interpreter_runs_nothing_but_listed_maths(records, says):
    with pytest.raises(PlanError, match=says):
        evaluate(records, {"t": torch.ones(2)}, ["x"])


@pytest.mark.parametrize(
    "expression",
    [
        "logp.masked_fill(~rollout.mask, float('-inf')).amax(-1)",
        "logp[:, None, ...][:, 0]",
        "logp.to(torch.float32)",
        "torch.where(score > 0, logp, float('nan')).nan_to_num(nan=0.5)",
        "torch.sum(logp, dim=(0, 2))",
    ],
)
def test_arguments_that_json_has_no_word_for(tmp_path, expression):
    algorithm = made(tmp_path, START + f"x = {expression}\nactor.update(rx.masked_mean(logp, rollout.mask))\n")
    env = step_values(PROMPTS, GROUP, LENGTH)
    graph = typed(algorithm).graph
    direct = evaluate(to_records(graph), env, ["x"])["x"]
    through_json = [
        NodeRecord.model_validate(json.loads(json.dumps(r.model_dump(mode="json"), allow_nan=False)))
        for r in to_records(graph)
    ]
    assert torch.equal(evaluate(through_json, env, ["x"])["x"], direct)


# ------------------------------------------------------------------------------------------------- the list of torch


def derivatives(run: Any) -> set[bool]:
    """Whether results of an op have a gradient, over the arguments that it takes; its backward must run."""
    found = set()
    for letters in ("x", "x1", "xx", "xxx", "mxx", "xm1", "xd"):
        x = torch.full((2, 3, 4), 0.3, dtype=torch.float64, requires_grad=True)
        arguments = [{"x": x, "m": x > 0, "1": 1.0, "d": (1,)}[letter] for letter in letters]
        try:
            y = run(*arguments)
        except (RuntimeError, TypeError, IndexError):
            continue
        if isinstance(y, Tensor):
            found.add(y.requires_grad)
            (y.sum() if y.requires_grad else x.sum()).backward()
    return found


@pytest.mark.parametrize("row", TORCH_OPS.values(), ids=TORCH_OPS)
def test_the_list_knows_what_has_a_derivative(row):
    """Bitwise ops take no floats; every other op has a gradient for all its arguments or for none."""
    assert derivatives(row.run) <= {row.differentiable}


# ---- trainer and rollout engines


def gaps_of(plan: Plan) -> dict[str, float]:
    """Metrics of a step in which 3 tokens of prompt 0 are 0.25 nats apart and 9 tokens of prompt 1 are 0.5 apart."""
    scores = Scores(plan, training_seat(Job.model_validate(plan.job), 0), Groups())
    lengths = torch.tensor([[1, 2], [4, 5]])
    shape = (2, 2, 6)
    rollout = Rollout(
        torch.zeros(shape, dtype=torch.int64), lengths, torch.zeros(shape), torch.arange(2), torch.ones(shape)
    )
    (node,) = plan.losses["actor"].forward
    for prompt, nats in ((0, 0.25), (1, -0.5)):
        scores.compare(node, torch.full((1, 2, 6), nats), {scores.rollout: rollout}, prompt)
    found = scores.means()
    scores.begin()
    assert scores.means() == {}
    return found


def test_each_rollout_engine_is_compared_with_the_trainer() -> None:
    """Over both 3 and 9 tokens: (3 x 0.25 + 9 x 0.5) / 12; an engine that stands alone is all there is."""
    both = {"logprob_gap": 0.4375, "logprob_gap_engine_0": 0.25, "logprob_gap_engine_1": 0.5}
    assert gaps_of(megatron_plan(2)) == pytest.approx(both)
    assert gaps_of(tiny_plan()) == pytest.approx({"logprob_gap": 0.4375})
