"""Every example algorithm: its plan passes the checker, its loss and gradient are the formula of its paper."""

from __future__ import annotations

from functools import cache

import golden
import pytest
from algorithms import EXAMPLES

from rollplex import hosts
from rollplex.ir.checker import check_plan
from rollplex.ir.errors import RunError
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run, UpdateChunk
from rollplex.passes.pipeline import compile_plan
from rollplex.runtime.metrics import watched
from rollplex.show.page import plan_page

PLANS = {
    "ppo": "ppo_32b_h800x32",
    "grpo_reward_model": "reward_model_32b_h800x8",
    "rloo": "critic_free_7b_h800x8",
    "reinforce_pp": "critic_free_7b_h800x8",
    "dapo": "dapo_32b_h800x32",
    "gspo": "gspo_30b_a3b_h800x16",
    "embodied": "embodied_7b_h800x8",
}


@cache
def plan(name: str, *overrides: str) -> Plan:
    job = load_job(EXAMPLES / "jobs" / f"{PLANS[name]}.yaml", overrides)
    return compile_plan(load_algorithm(EXAMPLES / f"{name}.py"), job)


@pytest.mark.parametrize("name", PLANS)
def test_examples_fit_and_pass_the_checker(name: str) -> None:
    assert plan(name).feasible
    assert check_plan(plan(name)) == ()


@pytest.mark.parametrize("name", PLANS)
def test_pages(name: str) -> None:
    """The page of every example, as `--plan-only` prints it."""
    page = "\n".join(text.plain for text in plan_page(plan(name), f"{PLANS[name]}.yaml"))
    golden.check(f"plan_{name}.txt", page + "\n")


HOST_JOBS = {
    "gspo": "gspo", "dapo": "dapo", "rloo": "critic_free", "reinforce_pp": "critic_free", "ppo": "ppo",
    "grpo_reward_model": "reward_model", "embodied": "embodied",
}  # fmt: skip


@pytest.mark.parametrize("name", HOST_JOBS)
def test_every_algorithm_has_a_job_that_the_host_backend_runs(name: str) -> None:
    """It fits, nothing of it is called unexecutable, and the job binds its reward."""
    job = load_job(EXAMPLES / "jobs" / f"{HOST_JOBS[name]}_host.yaml")
    made = compile_plan(load_algorithm(EXAMPLES / f"{name}.py"), job)
    assert (made.feasible, made.not_executable) == (True, ())
    assert watched(made) == ("judge" if name == "grpo_reward_model" else "reward")
    bound = hosts.find(made, {})
    assert list(bound) == list(dict.fromkeys(made.hosts.values()))
    assert all(f("?", "left", "<answer>left</answer>", {}) == 1 for n, f in bound.items() if n == "reward")


def test_a_job_that_binds_a_function_nobody_calls_is_refused_and_so_is_a_file_that_is_not_there() -> None:
    algorithm, path = load_algorithm(EXAMPLES / "gspo.py"), EXAMPLES / "jobs" / "gspo_host.yaml"
    unknown = compile_plan(algorithm, load_job(path, ["run.hosts.judge=os.path:join"]))
    with pytest.raises(RunError, match=r"run.hosts: the algorithm calls no host function `judge`\n    try: reward"):
        hosts.find(unknown, {})
    gone = compile_plan(algorithm, load_job(path, ["run.hosts.reward=none.py:f"]))
    with pytest.raises(RunError, match=r"run.hosts.reward: there is no file .*examples/jobs/none.py"):
        hosts.find(gone, {})
    assert list(hosts.find(gone, {}, ["reward=os.path:join"])) == ["reward"]  # the command line comes first


@pytest.mark.parametrize("schedule", ["serial", "naive"])
@pytest.mark.parametrize("name", PLANS)
def test_examples_pass_the_checker_under_other_schedules(name: str, schedule: str) -> None:
    assert check_plan(plan(name, f"schedule={schedule}")) == ()


# ---- dynamic sampling


def test_rounds_before_the_last_run_alone() -> None:
    """P1 sample | P1 prefix-actor .. P1 decode: prompts so long that their prefixes outlast the last round."""
    short = ("workload.prompt_tokens=16384", "workload.response_tokens=64", "workload.response_median=32")
    made = plan("dapo", *short)
    times, windows = made.summary.times, {w.name: w for w in made.summary.windows}
    alone = windows["P1 sample"].seconds
    last = times.decode_s - alone
    assert times.prefix_s > last + times.interference_s
    assert times.step_s == pytest.approx(alone + times.prefix_s + times.post_s + times.exposed_transfer_s, abs=1e-5)
    assert times.saving_bound_s <= last + 1e-6
    assert windows["P1 sample"].hbm_bytes < windows["P1 decode"].hbm_bytes
    once = plan("dapo", *short, "workload.dynamic_sampling=null")
    assert made.summary.peak_hbm_bytes == once.summary.peak_hbm_bytes
    assert check_plan(made) == ()


# ---- several roles


def test_the_critic_is_trained_before_the_actor_whose_loss_needs_its_values() -> None:
    """P2 score-reference | train-critic -> values -> train-actor || P3 update-critic | update | publish"""
    found = [w.name for w in plan("ppo").summary.windows if w.phase != "P1"]
    assert found == [
        "P2 score-reference", "P2 train-critic", "P2 train-actor", "P3 update-critic", "P3 update", "P3 publish",
    ]  # fmt: skip
    train = {s.role: s for s in plan("ppo").programs["train"] if isinstance(s, Run) and s.task == "train"}
    assert train["critic"].outputs == ("values",)
    assert "values" in train["actor"].inputs
    assert "logp" not in train["critic"].inputs


def test_each_trained_role_has_its_own_objects_chunks_and_loss() -> None:
    ppo = plan("ppo")
    names = {o.name for o in ppo.summary.objects}
    for role in ("actor", "critic"):
        assert names >= {f"{role}.{part}" for part in ("snapshot", "gradients", "master", "moments", "boundary")}
        chunks = [s for s in ppo.programs["train"] if isinstance(s, UpdateChunk) and s.role == role]
        assert len(chunks) == ppo.summary.chunks.of(role).count
        assert ppo.losses[role].role == role
    assert ppo.object("critic.snapshot").readers == ()


def test_a_critic_has_the_size_of_its_own_model_without_logits() -> None:
    """Qwen2.5-VL-7B at TP 4: a quarter of its language model, its vocabulary head replaced by one row."""
    ppo = plan("ppo")
    job = load_job(EXAMPLES / "jobs" / "ppo_32b_h800x32.yaml")
    spec = load_job(EXAMPLES / "jobs" / "ppo_32b_h800x32.yaml", ["roles.critic.head=scalar"]).spec_of("critic")
    assert job.spec_of("critic").name == spec.name == "Qwen2.5-VL-7B"
    assert job.spec_of("critic").parameters - spec.parameters == (spec.vocab - 1) * spec.hidden
    page = job.device.page_bytes
    assert 0 <= ppo.object("critic.gradients").bytes - 4 * spec.rank_parameters(4, "language") < page
    boundary = ppo.object("critic.boundary")
    assert boundary.slots == 64 // 8
    assert boundary.bytes == boundary.slots * 8192 * spec.kv_bytes_per_token(4, 2)


def test_plans_for_other_engines_say_what_they_do_not_run_of_a_critic_or_a_reward_model() -> None:
    for name, role in (("ppo", "critic"), ("grpo_reward_model", "judge")):
        assert any(f"{role} ends in one number" in what for what in plan(name).not_executable)
        assert any(f"{role} has a model of its own" in what for what in plan(name).not_executable)
    assert any("critic is trained beside actor" in what for what in plan("ppo").not_executable)
