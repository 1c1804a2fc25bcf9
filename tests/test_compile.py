"""Compiling the paper's 32B job: what fits, what does not, and the same bytes twice."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from capacities import without_remedies

from rollplex.ir.errors import JobError
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan, parse_plan
from rollplex.ir.steps import Barrier, Run, UpdateChunk
from rollplex.passes.pipeline import compile_plan, default_pipeline

GRPO = load_algorithm("examples/grpo.py")
X8, X32 = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", "examples/jobs/qwen2_5_vl_32b_h800x32.yaml"
GIB = 2**30


def compiled(job: str, *overrides: str) -> Plan:
    return compile_plan(GRPO, load_job(job, overrides))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compiled(X8)


@pytest.fixture(scope="module")
def naive() -> Plan:
    return compiled(X8, "schedule=naive")


def test_the_rollplex_schedule_fits_one_node(plan: Plan) -> None:
    """numbers: snapshot 15.3 + buffer 1.1 + KV 29 + runtime 3 + boundary 16 + reference 7.6 + tower 1.3 = 73.3 GiB.

    Beside them, two contexts of 774 MiB; NCCL over tp8 in the trainer (840 MiB), over tp4 in vLLM, twice (840 + 485),
    beside the buffers of its all-reduces (24).
    """
    assert plan.feasible
    assert plan.summary.peak_hbm_bytes < 80 * GIB
    assert plan.summary.peak_hbm_bytes <= plan.summary.capacity_bytes == round(79.1 * GIB)
    decode = next(w for w in plan.summary.windows if w.name == "P1 decode")
    assert decode.hbm_bytes / GIB == pytest.approx(73.3 + (2 * 774 + 840 + 840 + 485 + 24) / 1024, abs=0.1)


TABLE_1 = {
    "actor.snapshot": 7.63,
    "actor.gradients": 15.26,
    "actor.master": 15.26,
    "actor.moments": 30.51,
    "reference.weights": 7.63,
    "rollout.weights": 15.26,
    "rollout.kv": 29.0,
    "rollout.runtime": 3.0,
}


def test_naive_overlap_is_table_1(naive: Plan) -> None:
    """Every row of the paper's Table 1 within 1 % of the arithmetic, activations within 10 % of the paper's 28.3."""
    objects = {o.name: o.bytes / GIB for o in naive.summary.objects}
    for name, gib in TABLE_1.items():
        assert objects[name] == pytest.approx(gib, rel=0.01), name
    assert objects["actor.boundary"] + objects["reference.boundary"] == pytest.approx(16.0, rel=0.01)
    assert objects["train.activations"] == pytest.approx(28.3, rel=0.10)
    contexts = objects["train.context"] + objects["rollout.context"]
    assert 164 <= naive.summary.peak_hbm_bytes / GIB - contexts <= 170


def test_naive_overlap_does_not_fit_and_says_what_would(naive: Plan) -> None:
    """Infeasible in its first window, short by what is over 79.1 GiB; the rollplex schedule is among the remedies."""
    assert not naive.feasible
    assert naive.infeasible is not None
    assert naive.infeasible.window == naive.summary.windows[0].name
    assert naive.infeasible.shortfall_bytes == naive.summary.windows[0].hbm_bytes - naive.summary.capacity_bytes
    assert [o.bytes for o in naive.infeasible.objects] == sorted(
        (o.bytes for o in naive.infeasible.objects), reverse=True
    )
    remedies = {r.change for r in naive.infeasible.remedies}
    assert "schedule=rollplex" in remedies


def test_a_remedy_makes_the_job_fit(naive: Plan) -> None:
    """Each remedy, applied as an override, compiles to a feasible plan."""
    assert naive.infeasible is not None
    for remedy in naive.infeasible.remedies:
        assert compiled(X8, remedy.change).feasible, remedy.change


def test_four_nodes_compile(plan: Plan) -> None:
    """32 GPUs: a quarter of the prompts a rank, gradients reduced over data-parallel ranks."""
    wide = compiled(X32)
    assert wide.feasible
    assert wide.processes["train"].data_parallel == 4
    assert [s.group for s in wide.programs["train"] if s.kind == "exchange"] == ["dp", "q"]
    assert wide.object("actor.boundary").bytes * 4 == plan.object("actor.boundary").bytes


@pytest.mark.parametrize("overrides", [(), ("schedule=serial",), ("schedule=naive",)])
def test_two_compilations_give_the_same_bytes(overrides: tuple[str, ...]) -> None:
    """Plans are reproducible: one solver worker, a fixed seed, no clock in the plan."""
    assert compiled(X8, *overrides).to_json() == compiled(X8, *overrides).to_json()


def test_a_plan_survives_its_json(plan: Plan) -> None:
    """Written and read back, a plan is equal to itself."""
    assert parse_plan(json.loads(plan.to_json())) == plan


def test_serial_runs_prefixes_after_the_rollout_and_rollplex_before_it_ends(plan: Plan) -> None:
    """P1 decode || P2 prefix ..   against   P1 prefix .. (beside decode) ||"""
    serial = compiled(X8, "schedule=serial")

    def before_rollout_ends(p: Plan) -> list[bool]:
        steps = p.programs["train"]
        end = next(i for i, s in enumerate(steps) if isinstance(s, Barrier))
        return [i < end for i, s in enumerate(steps) if isinstance(s, Run) and s.task == "prefix"]

    assert len(before_rollout_ends(plan)) == 64
    assert all(before_rollout_ends(plan))
    assert not any(before_rollout_ends(serial))
    assert plan.summary.times.step_s < serial.summary.times.step_s


def test_equation_1(plan: Plan) -> None:
    """T = max(T_D + d_D, T_P) + T_post; the saving is bounded by min(T_P - d_D, T_D)."""
    t = plan.summary.times
    assert t.step_s == pytest.approx(max(t.decode_s + t.interference_s, t.prefix_s) + t.post_s + t.exposed_transfer_s)
    assert sum(w.seconds for w in plan.summary.windows) == pytest.approx(t.step_s, abs=1e-4)
    assert t.serial_s - t.step_s <= t.saving_bound_s + 1e-6
    assert t.saving_bound_s == pytest.approx(min(t.prefix_s - t.interference_s, t.decode_s))


def test_chunks_cover_the_parameters_of_a_rank_once(plan: Plan) -> None:
    """[0, a) [a, b) .. [z, total): the language model's share of one of eight ranks, the tower frozen."""
    chunks = [s for s in plan.programs["train"] if isinstance(s, UpdateChunk)]
    assert chunks[0].start == 0
    assert all(a.stop == b.start for a, b in pairwise(chunks))
    spec = load_job(X8).spec
    assert chunks[-1].stop == spec.rank_parameters(8, "language")


def test_training_the_tower_is_planned_for() -> None:
    """Without freeze, each rank updates a replica of the tower: its states and the reference's own tower appear."""
    trained = compiled(X8, "roles.actor.freeze=[]")
    spec = load_job(X8).spec
    extra = 4 * spec.vision_parameters
    assert trained.object("actor.gradients").bytes == pytest.approx(
        4 * spec.rank_parameters(8, "language") + extra, rel=1e-4
    )
    assert trained.object("reference.vision").bytes == pytest.approx(2 * spec.vision_parameters, rel=1e-3)


def test_every_pass_has_a_name_a_sentence_and_a_fact() -> None:
    """`rollplex passes` prints these."""
    names = [p.name for p in default_pipeline()]
    assert len(set(names)) == len(names) == 13
    assert all(type(p).__doc__ and p.makes.__doc__ for p in default_pipeline())
    assert all(p.makes.made_by == p.name for p in default_pipeline())  # type: ignore[attr-defined]


LAYER = 4 * 5120 * 2 // 8 + (2 * 40 + 2 * 8) * 128 * 2 // 8 + 4 * 40 // 8 + 4 * 27648 * 2 // 8
"""Bytes that a layer of the 32B model saves of a token at TP 8: norms, q k v and output, log-sum-exps, SwiGLU."""
INPUT = 5120 * 2 // 8
SUMMED_APART = 5 * ((8192 // 256 + 1) * 8192 * 128 * 4 + 8192 * 4)
MADE_AGAIN = {
    "full": 8192 * (64 * INPUT + 2 * INPUT + (5 + 4) * 128 * 2 + 2 * 4 + 4 * 128),
    "none": 8192 * (64 * LAYER + 4 * 128),
}


def apart(*overrides: str) -> Plan:
    """The plan whose prefixes do not run with their groups, which `auto` would have them do for less time."""
    return without_remedies(GRPO, load_job(X8, overrides))


@pytest.mark.parametrize("prefix_saved", ["auto", "dropped"])
@pytest.mark.parametrize("recompute", MADE_AGAIN)
def test_a_dropped_prefix_has_room_to_be_made_again(recompute: str, prefix_saved: str) -> None:
    """By wish or by the solver: one prompt's saved state beside one layer's backward and the gradient of its KV."""
    few = ("cluster.host_memory_gb=700", "workload.response_tokens=64")
    plan = apart(*few, f"roles.actor.recompute={recompute}", f"roles.actor.prefix_saved={prefix_saved}")
    assert set(plan.object("actor.prefix_saved").residency.values()) <= {"dropped", "-"}
    backward = 8192 * (LAYER + 2 * INPUT + 3 * 27648 // 8 * 2) + SUMMED_APART
    boundary = 8192 * 64 * 2 * 128 * 2
    exact = MADE_AGAIN[recompute] + backward + boundary
    assert 0 <= plan.object("train.activations").bytes - exact < 2 << 20


@pytest.mark.parametrize("overrides", [("roles.actor.prefix_saved=dropped",), ("cluster.host_memory_gb=700",)])
def test_a_dropped_prefix_is_made_again_through_a_frozen_tower(overrides: tuple[str, ...]) -> None:
    """Dropped by wish, or because the pinned pool is small: the prefix backward reads the tower that it runs again."""
    dropped = apart(*overrides)
    assert set(dropped.object("actor.prefix_saved").residency.values()) <= {"dropped", "-"}
    backward = [s for s in dropped.programs["train"] if isinstance(s, Run) and s.task == "prefix_backward"]
    assert all("actor.vision" in s.reads for s in backward)
    assert "P2 train-actor" in dropped.object("actor.vision").consumed


def test_a_number_of_chunks_that_the_job_names_is_kept_even_where_it_does_not_fit() -> None:
    """Two chunks three times in flight are larger than the room beside snapshot and gradients: infeasible, no crash."""
    coarse = compiled(X8, "optimizer.chunks=2")
    assert coarse.summary.chunks.optimizer.count == 2
    assert coarse.infeasible is not None
    assert coarse.infeasible.window == "P3 update"
    assert coarse.infeasible.objects[0].name == "optimizer.workspace"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.in_flight=65", "at most 64"),
        ("optimizer.chunks=4097", "a whole number from 1 to 4096"),
        ("cluster.capacity_gib=1e12", "must be at most 1.04858e"),
    ],
)
def test_sizes_beyond_reason_are_refused(override: str, message: str) -> None:
    """A slip of the pen is a problem of the job, not of the solver."""
    with pytest.raises(JobError, match=message):
        load_job(X8, [override])
