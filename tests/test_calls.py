"""Calls that are not split, several trained roles, and what no schedule can arrange."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from algorithms import FIRST_LINE, made

from rollplex.ir.checker import check_plan
from rollplex.ir.errors import GraphError
from rollplex.ir.job import Job, load_job
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run
from rollplex.passes.pipeline import compile_plan

X8 = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"
FEW = ("workload.prompts=4", "workload.prompt_tokens=2048", "workload.response_tokens=512", "workload.group=4")
CRITIC = (
    "roles.critic.train.tensor_parallel=8", "roles.critic.model=Qwen2.5-VL-32B", "roles.critic.freeze=[vision]",
    "roles.actor.rollout.kv_cache_gib=4",
)  # fmt: skip
SIGNATURE = "prompts, *, actor, reference, reward, other, n=4"
ROLES = "prompts, *, actor, critic, reference, reward, n=4"

RETOLD = """
rollout = actor.generate(prompts, n=n)
retold = rx.host(other, returns="sample_prompts")(prompts, rollout)
ref_logp = reference.logprobs(retold, rollout)
logp = actor.logprobs(prompts, rollout)
score = rx.host(reward)(prompts, rollout)
actor.update(rx.masked_mean((logp - ref_logp) * score, rollout.mask))
"""
GIVEN = """
rollout = actor.generate(prompts, n=n)
given = rx.host(other, returns="rollout")(prompts)
ref_logp = reference.logprobs(prompts, given)
logp = actor.logprobs(prompts, rollout)
score = rx.host(reward)(prompts, rollout)
actor.update(rx.masked_mean(logp * score, rollout.mask) + rx.masked_mean(ref_logp, given.mask))
"""
TRAINED = """
rollout = actor.generate(prompts, n=n)
retold = rx.host(other, returns="sample_prompts")(prompts, rollout)
ref_logp = reference.logprobs(prompts, rollout)
logp = actor.logprobs(retold, rollout)
score = rx.host(reward)(prompts, rollout)
actor.update(rx.masked_mean((logp - ref_logp) * score, rollout.mask))
"""
PPO = """
rollout = actor.generate(prompts, n=n)
ref_logp = reference.logprobs(prompts, rollout)
logp = actor.logprobs(prompts, rollout)
values = critic.values(prompts, rollout)
score = rx.host(reward)(prompts, rollout)
"""


def job(*overrides: str) -> Job:
    return load_job(X8, (*FEW, *overrides))


def compiled(folder: Path, body: str, *overrides: str, signature: str = SIGNATURE) -> Plan:
    plan = compile_plan(made(folder, dedent(body).strip("\n"), signature), job(*overrides))
    assert check_plan(plan) == ()
    return plan


def windows(plan: Plan) -> list[str]:
    return [w.name for w in plan.summary.windows]


def tasks(plan: Plan, task: str) -> list[Run]:
    return [s for s in plan.programs["train"] if isinstance(s, Run) and s.task == task]


@pytest.mark.parametrize("schedule", ["rollplex", "serial", "naive"])
@pytest.mark.parametrize("body", [RETOLD, GIVEN, TRAINED])
def test_plans_with_whole_calls_pass_the_checker(tmp_path: Path, body: str, schedule: str) -> None:
    assert compiled(tmp_path, body, f"schedule={schedule}").not_executable


def test_a_call_on_what_responses_made_runs_whole_behind_the_rollout(tmp_path: Path) -> None:
    """retold --> reference.logprobs(retold, rollout): no prefix, no boundary, a window in P2."""
    plan = compiled(tmp_path, RETOLD)
    assert windows(plan)[:4] == ["P1 prefix-actor", "P1 decode", "P2 score-reference", "P2 train-actor"]
    assert not any(o.name == "reference.boundary" for o in plan.summary.objects)
    whole = tasks(plan, "whole")
    assert [s.microbatch for s in whole] == list(range(4))
    assert set(whole[0].inputs) == {"rollout", "retold"}
    assert any("is not split" in what for what in plan.not_executable)


def test_a_call_that_needs_no_response_runs_beside_the_rollout(tmp_path: Path) -> None:
    """given = host(prompts) --> reference.logprobs(prompts, given): in P1; its host function before the rollout."""
    plan = compiled(tmp_path, GIVEN)
    assert windows(plan)[:3] == ["P1 prefix-actor", "P1 score-reference", "P1 decode"]
    hosts = [s.node for s in plan.programs["controller"] if isinstance(s, Run) and s.task == "host"]
    assert hosts == ["given", "score"]
    assert plan.summary.times.prefix_s > sum(w.seconds for w in plan.summary.windows if w.name == "P1 prefix-actor")
    assert "P2 score-reference" in windows(compiled(tmp_path, GIVEN, "schedule=serial"))


def test_a_trained_role_may_be_called_whole(tmp_path: Path) -> None:
    """No prefix, no saved state, no prefix backward; activations of prompt and response together."""
    plan = compiled(tmp_path, TRAINED)
    split = compiled(tmp_path, TRAINED.replace("(retold,", "(prompts,"))
    assert "P1 prefix-actor" not in windows(plan)
    assert tasks(plan, "prefix_backward") == []
    assert len(tasks(plan, "train")) == 4
    assert plan.object("train.activations").bytes > split.object("train.activations").bytes


# ---- order of trained roles


def losses(actor: str, critic: str) -> str:
    mean = "rx.masked_mean({}, rollout.mask)"
    return PPO + f"a = {mean.format(actor)}\nc = {mean.format(critic)}\nactor.update(a)\ncritic.update(c)\n"


@pytest.mark.parametrize(
    ("actor", "critic", "order"),
    [
        ("logp * values.detach()", "(values - score) ** 2", ["critic", "actor"]),
        ("logp * score", "(values - logp.detach()) ** 2", ["actor", "critic"]),
        ("logp * score", "(values - score) ** 2", ["actor", "critic"]),
    ],
)
def test_roles_are_trained_in_the_order_of_their_dependences(
    tmp_path: Path, actor: str, critic: str, order: list[str]
) -> None:
    """Whose values are in the other's loss comes first, whatever the roles are called; else the program's order."""
    plan = compiled(tmp_path, losses(actor, critic), *CRITIC, signature=ROLES)
    assert [w.removeprefix("P2 train-") for w in windows(plan) if "train-" in w] == order
    assert windows(plan)[-3:] == ["P3 update-critic", "P3 update", "P3 publish"]


def refused(folder: Path, body: str, *overrides: str, signature: str = SIGNATURE) -> str:
    with pytest.raises(GraphError) as error:
        compiled(folder, body, *overrides, signature=signature)
    return str(error.value)


def line(body: str, text: str) -> int:
    return FIRST_LINE + next(i for i, row in enumerate(dedent(body).strip("\n").splitlines()) if text in row)


def test_losses_that_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    body = losses("logp * values.detach()", "(values - logp.detach()) ** 2")
    assert refused(tmp_path, body, *CRITIC, signature=ROLES) == (
        f"made.py:{line(body, 'actor.update')}: the losses of `actor` and `critic` each need the other's forward: "
        "neither can be first\n    try: take what is known before the update from the rollout: "
        "rollout.logprobs instead of actor.logprobs(..)"
    )


def test_a_gradient_into_another_trained_role_is_refused(tmp_path: Path) -> None:
    """values without detach in the actor's loss; the line is that of the first use."""
    body = losses("logp * values", "(values - score) ** 2")
    assert refused(tmp_path, body, *CRITIC, signature=ROLES) == (
        f"made.py:{line(body, 'a = ')}: the loss of `actor` sends a gradient into `critic` through `values`\n"
        "    try: use values.detach() here; `critic` learns from its own critic.update(..)"
    )


def test_a_role_that_the_job_trains_is_updated(tmp_path: Path) -> None:
    body = PPO + "actor.update(rx.masked_mean(logp * values * score, rollout.mask))\n"
    assert refused(tmp_path, body, *CRITIC, signature=ROLES) == (
        f"made.py:{line(body, 'critic.values')}: `critic` is never updated, and the job has roles.critic.train\n"
        "    try: end with critic.update(loss), or give the role `score` instead"
    )


def test_a_model_has_one_head(tmp_path: Path) -> None:
    body = PPO.replace("critic.values", "actor.values") + "actor.update(rx.masked_mean(logp * values, rollout.mask))\n"
    signature = ROLES.replace("critic, ", "")
    assert refused(tmp_path, body, signature=signature) == (
        f"made.py:{line(body, 'actor.values')}: `actor` ends in logits at line {line(body, 'actor.logprobs')} and in "
        "scalar here\n    try: a model has one head: make the critic a role of its own"
    )


def test_a_job_may_not_say_another_head(tmp_path: Path) -> None:
    body = losses("logp * values.detach()", "(values - score) ** 2")
    assert refused(tmp_path, body, *CRITIC, "roles.critic.head=logits", signature=ROLES) == (
        f"made.py:{line(body, 'critic.values')}: `critic` is called for values, and the job says "
        "roles.critic.head: logits\n    try: roles.critic.head: scalar, or leave it out"
    )


def test_a_critic_is_not_sampled_from(tmp_path: Path) -> None:
    body = losses("logp * values.detach()", "(values - score) ** 2").replace("actor.generate", "critic.generate")
    assert "`critic` is trained only and cannot generate" in refused(tmp_path, body, *CRITIC, signature=ROLES)


def test_a_host_function_takes_no_result_of_a_model(tmp_path: Path) -> None:
    body = RETOLD.replace("rx.host(reward)(prompts, rollout)", "rx.host(reward)(prompts, rollout, ref_logp)")
    assert refused(tmp_path, body) == (
        f"made.py:{line(body, 'score = ')}: host function `reward` takes `ref_logp`, which a model makes\n"
        "    try: a host function takes prompts, rollouts and what other host functions return"
    )


def test_one_rollout(tmp_path: Path) -> None:
    body = RETOLD.replace("retold = ", "again = actor.generate(prompts, n=n)\nretold = ")
    assert f"made.py:{line(body, 'again')}: an iteration has exactly one `generate`" in refused(tmp_path, body)


def test_each_role_is_scored_once(tmp_path: Path) -> None:
    body = RETOLD.replace("score = ", "again = reference.logprobs(prompts, rollout)\nscore = ")
    assert "`reference` has a second `suffix` call" in refused(tmp_path, body)
