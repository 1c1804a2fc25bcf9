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
from rollplex.passes.lever import key_of
from rollplex.passes.levers import levers
from rollplex.passes.pipeline import Recompiler, compile_plan, default_pipeline
from rollplex.passes.relax import lack
from rollplex.passes.remedies import Search, lessens
from rollplex.passes.residency_data import UNIT

GRPO = load_algorithm("examples/grpo.py")
X8, SHAPES = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", "examples/jobs/shapes_host.yaml"
X32, FSDP = "examples/jobs/qwen2_5_vl_32b_h800x32.yaml", "tests/cases/02_states_no_offload.yaml"
KV, SHARED = "roles.actor.rollout.kv_cache_gib=null", "roles.actor.rollout.gpu_memory_utilization="
SHARE = (KV, "roles.actor.rollout.runtime_gib=null", f"{SHARED}0.9")
POOLS = (
    "schedule=disaggregated",
    "cluster.rollout_gpus=8",
    "roles.reference.score.tensor_parallel=4",
    "workload.prompts=48",
    "roles.actor.rollout.kv_cache_gib=68",
)
CROWDED = ("workload.prompts=48", "roles.actor.rollout.kv_cache_gib=44")
JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "crowded": (X8, CROWDED),
    "large KV": (X8, ("roles.actor.rollout.kv_cache_gib=40", "workload.response_tokens=2500")),
    "little host memory": (X8, ("cluster.host_memory_gb=500", "roles.actor.prefix_saved=host")),
    "naive": (X8, ("schedule=naive",)),
    "ablated": (X8, ("ablate=[state_offload,weight_sharing]",)),
    "tiny": (SHAPES, ("cluster.capacity_gib=12 MiB",)),
    "share of memory": (X8, SHARE),
    "little pinned memory": (X8, ("cluster.host_memory_gb=700", "roles.actor.prefix_saved=host")),
    "states resident": (X32, ("ablate=[state_offload]",)),
    "FSDP without offload": (FSDP, ()),
    "pools": (X32, POOLS),
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
    plan = COMPILER.plan(job)
    return plan is not None and plan.feasible


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


# ---- every lever


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("share of memory", "roles.actor.rollout.gpu_memory_utilization"),
        ("little pinned memory", "cluster.pinned_share"),
        ("states resident", "roles.actor.train.distributed_optimizer"),
        ("states resident", "roles.actor.train.pipeline_parallel"),
        ("FSDP without offload", "roles.actor.train.offload_optimizer"),
        ("pools", "cluster.rollout_gpus"),
        ("crowded", "roles.actor.rollout.tensor_parallel"),
        ("naive", "schedule"),
    ],
)
def test_what_is_at_fault_has_its_remedy(name: str, key: str) -> None:
    """The keys that an expert would turn are among those that are told."""
    assert key in {key_of(o) for r in remedies(name) for o in r.change.split()}


REFERENCE_4 = "roles.reference.score.tensor_parallel=4"
MOE, ALONE = (
    "examples/jobs/gspo_30b_a3b_h800x16.yaml",
    ("roles.actor.train.tensor_parallel=4", "ablate=[state_offload]"),
)
LOGITS, LARGE = "tests/cases/20_logits_of_one_trajectory.yaml", "tests/cases/04_microbatch_too_large.yaml"
LONG = (*SHARE, "roles.actor.rollout.max_num_batched_tokens=65536", "roles.actor.rollout.mm_encoder_tp_mode=weights")


@pytest.mark.parametrize(
    ("path", "overrides", "key"),
    [
        (X32, ("ablate=[state_offload]",), "roles.actor.train.pipeline_parallel"),
        (X32, ("ablate=[state_offload]",), "roles.actor.train.distributed_optimizer"),
        (X32, ("schedule=naive",), "roles.reference.score.pipeline_parallel"),
        (X32, ("schedule=naive", REFERENCE_4), "roles.reference.score.tensor_parallel"),
        (X32, ("workload.response_tokens=65536", "roles.actor.recompute=none"), "roles.actor.train.context_parallel"),
        (X32, ("roles.actor.recompute=none", "workload.response_tokens=32768"), "roles.actor.recompute"),
        (X8, CROWDED, "layout.order"),
        (X8, ("schedule=naive",), "roles.actor.rollout.mm_encoder_tp_mode"),
        (X8, (*LONG, "cluster.capacity_gib=70"), "roles.actor.rollout.max_num_batched_tokens"),
        (LOGITS, (), "roles.actor.train.context_parallel"),
        (FSDP, ("roles.actor.train.zero=1",), "roles.actor.train.zero"),
        (FSDP, (), "roles.actor.train.offload_parameters"),
        (LARGE, ("cluster.capacity_gib=30", "roles.actor.rollout.kv_cache_gib=8"), "roles.actor.train.microbatch"),
        (X32, POOLS, "cluster.rollout_gpus"),
    ],
)
def test_a_lever_lessens_what_is_lacking(path: str, overrides: tuple[str, ...], key: str) -> None:
    """At its most drastic legal step some window lacks less, and none of its steps changes another key."""
    search = Search(load_job(path, (*NO_KV_LIMIT, *overrides) if "response" in str(overrides) else overrides), COMPILER)
    base = search.trial(()).lack
    assert base
    found = [lever for lever in search.levers if key in lever.keys]
    best = [search.trial(e).lack for lever in found if (e := search.extreme(lever))]
    assert any(left is not None and sum(left.values()) < sum(base.values()) for left in best), (found, base, best)


NO_KV_LIMIT = ("roles.actor.rollout.kv_cache_gib=900",)


def test_experts_are_dealt_out() -> None:
    """What a MoE trainer keeps resident shrinks with its expert-parallel degree, which the job's ranks must allow."""
    gspo = Recompiler(load_algorithm("examples/gspo.py"), default_pipeline())
    search = Search(load_job(MOE, ALONE), gspo)
    lever = next(lever for lever in search.levers if lever.keys == {"roles.actor.train.expert_parallel"})
    base, left = search.trial(()).lack, search.trial(lever.steps[-1]).lack
    assert base
    assert left is not None
    assert sum(left.values()) < sum(base.values())


def test_steps_set_the_same_keys_and_never_the_value_at_hand() -> None:
    """A lever is one decision: whatever its step, it is about the same keys, and none of them is as it was."""
    for path, overrides in [*JOBS.values(), (LARGE, ()), (MOE, ())]:
        job = load_job(path, overrides)
        for lever in levers(job):
            assert all({key_of(o) for o in step} == lever.keys for step in lever.steps)
            changed = [change_job(job, step) for step in lever.steps[:1] if Search(job, COMPILER).changed(step)]
            assert all(other != job for other in changed), str(lever)


def test_a_share_of_memory_never_starves_the_work() -> None:
    """No remedy lowers the KV cache below what the work takes: what queues has no price here."""
    for remedy in remedies("share of memory"):
        job = load_job(X8, (*SHARE, *remedy.change.split()))
        assert job.kv_cache_bytes >= job.rollout_kv_need_bytes


# ---- what it costs to find them


@pytest.mark.parametrize("name", ["crowded", "little host memory", "tiny", "share of memory", "pools"])
def test_room_is_what_the_residency_pass_finds(name: str) -> None:
    """Placements alone, without times, say the same as the whole solve; here of every mildest and most drastic step."""
    path, overrides = JOBS[name]
    search = Search(load_job(path, overrides), COMPILER)
    for lever in search.levers:
        for step in {lever.steps[0], lever.steps[-1]}:
            if (job := search.changed(step)) and search.trial(step).lack is not None:
                assert search.fits(step) == (COMPILER.plan(job) is not None), step


def test_few_jobs_are_tried_and_only_what_fits_is_compiled() -> None:
    """The naive overlap of 32B: no more trials than levers have ends, and one plan for each remedy."""
    job = load_job(X8, ("schedule=naive",))
    search = Search(job, COMPILER)
    singles, pairs = search.singles, list(search.pairs())
    assert not pairs
    assert len(singles) == len(search._plans) == 2
    assert len(search._trials) <= 1 + sum(min(2, len(lever.steps)) for lever in search.levers)


def test_a_change_is_not_told_when_it_is_milder_beside_another() -> None:
    """`workload.prompts=8` says nothing new beside `workload.prompts=42` with a smaller KV budget."""
    for name in JOBS:
        keys = [frozenset(key_of(o) for o in r.change.split()) for r in remedies(name)]
        assert not any(a < b for i, b in enumerate(keys) for a in keys[i + 1 :])
