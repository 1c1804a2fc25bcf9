"""`prefix_saved: auto` runs prefixes with their groups where that is faster, or where what it would take else is over.

serial, all saved    host lacks room, so dropped: step 229.6 s      with groups: 217.1 s      taken
rollplex             decode hides the prefixes of both roles        with groups it does not   left
"""

from __future__ import annotations

from functools import cache

import pytest

from rollplex.ir.checker import check_plan
from rollplex.ir.job import load_job
from rollplex.ir.job_auto import load_jobs
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes.assemble import build_plan
from rollplex.passes.degrees import compile_best
from rollplex.passes.pipeline import PassReport, compile_plan, full_pipeline, run_passes, start
from rollplex.passes.with_group import least_s, left_open, with_groups

X8 = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"
GRPO = load_algorithm("examples/grpo.py")
ALL_SAVED = ("schedule=serial", "roles.actor.recompute=none")
MANY_PROMPTS = (
    *("schedule=serial", "workload.prompts=176", "workload.group=2", "workload.response_tokens=128"),
    "roles.actor.rollout.kv_cache_gib=47",
)
TAKEN = "prefix_saved: auto runs prefixes of actor with their groups"


@cache
def compiled(*overrides: str) -> Plan:
    return compile_plan(GRPO, load_job(X8, overrides))


def stated(place: str, *overrides: str) -> Plan:
    """The plan of a job that says where the saved state is, without remedies."""
    job = load_job(X8, (*overrides, f"roles.actor.prefix_saved={place}"))
    return build_plan(run_passes(start(GRPO, job), full_pipeline()))


def saved(plan: Plan) -> str:
    """What the plan's job says, which is what a run does."""
    return plan.job["roles"]["actor"]["prefix_saved"]


def told(plan: Plan) -> list[str]:
    return [w for w in plan.summary.warnings if w.startswith("prefix_saved: auto")]


def test_it_is_taken_where_a_step_is_faster() -> None:
    """All that 32 prefixes save has room neither in HBM nor at the host, and dropped it costs another 12.5 s."""
    plan, group, dropped = compiled(*ALL_SAVED), stated("group", *ALL_SAVED), stated("dropped", *ALL_SAVED)
    assert not any(stated(place, *ALL_SAVED).feasible for place in ("hbm", "host"))
    assert plan.feasible
    assert saved(plan) == "group"
    assert plan.programs == group.programs
    less = dropped.summary.times.step_s - group.summary.times.step_s
    assert told(plan) == [f"{TAKEN}: a step takes {less:.3g} s less"]
    assert less == pytest.approx(12.5, abs=0.5)
    assert check_plan(plan) == ()


def test_it_is_taken_where_nothing_else_fits() -> None:
    """Keys and values of 176 prompts are 44 GiB; of one they are a quarter of one."""
    assert not any(stated(place, *MANY_PROMPTS).feasible for place in ("hbm", "host", "dropped"))
    plan = compiled(*MANY_PROMPTS)
    assert plan.feasible
    assert saved(plan) == "group"
    assert told(plan) == [f"{TAKEN}: what it would be else does not fit"]


def test_it_is_left_where_decode_hides_the_prefix() -> None:
    """12.5 s of the actor's prefixes would come behind decode, for the 1 s of transfers that nothing hides."""
    module = run_passes(start(GRPO, load_job(X8)), full_pipeline())
    changed = with_groups(load_job(X8), left_open(module))
    assert changed is not None
    times, group = compiled().summary.times, stated("group").summary.times
    assert least_s(module, changed) == pytest.approx(group.step_s - group.exposed_transfer_s, abs=1e-5)
    assert least_s(module, changed) > times.step_s
    assert (saved(compiled()), told(compiled())) == ("auto", [])


def test_what_a_job_states_is_what_it_gets() -> None:
    plan = compiled(*ALL_SAVED, "roles.actor.prefix_saved=dropped")
    assert (saved(plan), told(plan)) == ("dropped", [])


@pytest.mark.parametrize(
    "overrides",
    [
        ("ablate=[state_offload]",),
        ("schedule=streamed",),
        ("roles.actor.train.tensor_parallel=4", "roles.actor.train.pipeline_parallel=2"),
        ("workload.rollout={kind: oversample, factor: 1.5}", "schedule=serial", "roles.actor.rollout.kv_cache_gib=40"),
    ],
)
def test_it_is_not_tried_where_it_may_not_be_or_where_a_mechanism_is_off(overrides: tuple[str, ...]) -> None:
    assert with_groups(load_job(X8), ("actor",)) is not None
    assert with_groups(load_job(X8, overrides), ("actor",)) is None


def test_passes_of_the_plan_are_told_last() -> None:
    """`--print-after` ends with the module that the plan is made of."""
    reports: list[PassReport] = []
    compile_plan(GRPO, load_job(X8, ALL_SAVED), on_pass=reports.append)
    names = [p.name for p in full_pipeline()]
    assert [r.name for r in reports] == names * 2
    asked = [r.module.job.roles["actor"].prefix_saved for r in reports]
    assert asked == ["auto"] * len(names) + ["group"] * len(names)


def test_degrees_are_compared_with_it() -> None:
    """Of the tensor-parallel sizes of rollout, each as good as it can be."""
    plan = compile_best(GRPO, load_jobs(X8, (*ALL_SAVED, "roles.actor.rollout.tensor_parallel=auto")))
    assert saved(plan) == "group"
    assert plan.summary.runners_up
    assert all(c.step_s >= plan.summary.times.step_s for c in plan.summary.runners_up if c.feasible and c.step_s)
    assert check_plan(plan) == ()
