"""Remedies: each makes its job fit when it is pasted, none changes nothing, the amounts are the least that do."""

from __future__ import annotations

import io
import sys

import pytest

from rollplex import cli
from rollplex.ir.job import Job, load_job
from rollplex.ir.job_file import change_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan, Remedy
from rollplex.passes.levers import levers
from rollplex.passes.pipeline import Recompiler, compile_plan, default_pipeline
from rollplex.passes.relax import lack
from rollplex.passes.remedies import Search, lessens
from rollplex.passes.residency_data import UNIT

GRPO = load_algorithm("examples/grpo.py")
X8, SHAPES = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", "examples/jobs/shapes_host.yaml"
CROWDED = ("workload.prompts=48", "roles.actor.rollout.kv_cache_gib=44")
JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "crowded": (X8, CROWDED),
    "large KV": (X8, ("roles.actor.rollout.kv_cache_gib=40", "workload.response_tokens=2500")),
    "little host memory": (X8, ("cluster.host_memory_gb=500", "roles.actor.prefix_saved=host")),
    "naive": (X8, ("schedule=naive",)),
    "ablated": (X8, ("ablate=[state_offload,weight_sharing]",)),
    "tiny": (SHAPES, ("cluster.capacity_gib=12 MiB",)),
}
COMPILER = Recompiler(GRPO, default_pipeline())
_COMPILED: dict[str, Plan] = {}


def infeasible(name: str) -> Plan:
    """The plan of one of the jobs above, compiled once."""
    if name not in _COMPILED:
        path, overrides = JOBS[name]
        _COMPILED[name] = compile_plan(GRPO, load_job(path, overrides))
    return _COMPILED[name]


def remedies(name: str) -> tuple[Remedy, ...]:
    found = infeasible(name).infeasible
    assert found is not None
    return found.remedies


def test_every_job_has_a_remedy() -> None:
    """One key or two are enough for each of them."""
    assert all(remedies(name) for name in JOBS)


@pytest.mark.parametrize("name", JOBS)
def test_a_pasted_remedy_fits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rollplex compile ALGORITHM --job JOB [the job's own overrides] REMEDY` exits with 0."""
    path, overrides = JOBS[name]
    for remedy in remedies(name):
        monkeypatch.setattr(sys, "argv", ["rollplex", "compile", "examples/grpo.py", "--job", path, "--json"])
        sys.argv += [*overrides, *remedy.change.split()]
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0, remedy.change


@pytest.mark.parametrize("name", JOBS)
def test_a_remedy_is_what_it_says(name: str) -> None:
    """Verified, with the step difference of its own plan; none of its changes can be left out."""
    path, overrides = JOBS[name]
    plan = infeasible(name)
    for remedy in remedies(name):
        assert remedy.verified
        changes = tuple(remedy.change.split())
        fixed = compile_plan(GRPO, load_job(path, (*overrides, *changes)))
        assert remedy.costs_s == round(fixed.summary.times.step_s - plan.summary.times.step_s, 3)
        job = load_job(path, overrides)
        for i in range(len(changes)):
            fewer = Search(job, COMPILER).changed((*changes[:i], *changes[i + 1 :]))
            assert fewer is None or not fits(fewer), changes


def test_remedies_keep_prompts_whole_first_and_rank_by_the_cost_of_a_prompt() -> None:
    """Half the prompts in half the time are not cheaper; cut prompts come after whole ones."""
    for name in JOBS:
        ranks = [(lessens(tuple(r.change.split())) == 2, round(r.costs_share, 3)) for r in remedies(name)]
        assert ranks == sorted(ranks)
    halved = next(r for r in remedies("crowded") if r.change.startswith("workload.prompts="))
    assert halved.costs_s < 0 < halved.costs_share or halved.costs_share > halved.costs_s / 100


def fits(job: Job) -> bool:
    return COMPILER.plan(job).feasible


def test_an_amount_is_the_least_that_fits() -> None:
    """With one prompt group an engine more, or one step of the KV budget more, the job is over again."""
    job = load_job(X8, ["roles.actor.rollout.kv_cache_gib=40", "workload.response_tokens=2500"])
    search = Search(job, COMPILER)
    for lever in search.levers:
        found = search.least((), lever)
        if found and (at := lever.steps.index(found.overrides)):
            assert fits(change_job(job, lever.steps[at]))
            before = search.changed(lever.steps[at - 1])
            assert before is None or not fits(before)


@pytest.mark.parametrize("name", ["crowded", "little host memory", "tiny"])
def test_the_relaxation_never_refuses_what_fits(name: str) -> None:
    """lack(J) is a bound: whatever compiles has none, and the job at hand has some or the solver says no."""
    path, overrides = JOBS[name]
    for remedy in remedies(name):
        assert lack(COMPILER.lifetimes(load_job(path, (*overrides, *remedy.change.split())))) == {}


def test_the_relaxation_sees_a_window_that_cannot_fit() -> None:
    """What must be in HBM in P1 is over by itself, whatever else moves: 44 GiB of KV cache and two boundaries of 12."""
    over = lack(COMPILER.lifetimes(load_job(X8, CROWDED)))
    window = infeasible("crowded").infeasible
    assert window is not None
    assert 0 < over[window.window] <= window.shortfall_bytes + UNIT


def test_levers_know_what_a_job_refuses() -> None:
    """A data-parallel degree in the user's file forbids a wider trainer; the KV budget never goes below its need."""
    job = load_job(X8, ["roles.reference.score.data_parallel=1", "roles.actor.train.data_parallel=1", *CROWDED])
    search = Search(job, COMPILER)
    assert search.changed(("cluster.nodes=2",)) is None
    kv = next(lever for lever in levers(job) if lever.keys == {"roles.actor.rollout.kv_cache_gib"})
    least = change_job(job, kv.steps[-1])
    assert least.kv_cache_bytes >= least.rollout_kv_need_bytes
