"""Pipeline, context and expert parallelism, and the distributed optimizer: refusals, sizes, programs, faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_texts import GOOD, edited, refusal, write

from rollplex.ir.checker import check_plan
from rollplex.ir.errors import JobError
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.models import load_model
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange
from rollplex.ir.work import role_work
from rollplex.passes.costs import ways
from rollplex.passes.pipeline import compile_plan

GRPO = load_algorithm("examples/grpo.py")
X8, X32 = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", "examples/jobs/qwen2_5_vl_32b_h800x32.yaml"
TRAIN = "roles.actor.train."
FIRST = TRAIN + "num_layers_in_first_pipeline_stage"
PAGE = 2 * 2**20


def compiled(job: str, *overrides: str) -> Plan:
    return compile_plan(GRPO, load_job(job, overrides))


# ---- refusals: (overrides of the 32B job on four nodes, the message)

REFUSED = {
    "layers": (
        [TRAIN + "pipeline_parallel=3"],
        "pipeline_parallel 3 does not divide the 64 layers (Qwen2.5-VL-32B)\n"
        "    try: pipeline_parallel 1 or 2 or 4 or 8 or 16 or 32, or num_layers_in_first_pipeline_stage 20",
    ),
    "experts of a dense model": (
        [TRAIN + "expert_parallel=2"],
        "expert_parallel 2, but Qwen2.5-VL-32B has no experts\n    try: 1",
    ),
    "experts over too few ranks": (
        ["model.name=Qwen3-VL-30B-A3B", TRAIN + "tensor_parallel=4", TRAIN + "expert_parallel=16"],
        "expert_parallel 16 does not divide the 8 data x context parallel ranks\n    try: a divisor of 8",
    ),
    "too many GPUs a copy": (
        [TRAIN + "context_parallel=3"],
        "tensor_parallel 8 x context_parallel 3 is 24 GPUs a copy, which do not divide the 32",
    ),
    "stated data_parallel": (
        [TRAIN + "pipeline_parallel=2", TRAIN + "data_parallel=4"],
        "data_parallel 4 x tensor_parallel 8 x pipeline_parallel 2 is 64, but the cluster has 32 GPUs\n"
        "    try: data_parallel 2, or leave it out",
    ),
    "vocabulary": (
        [TRAIN + "make_vocab_size_divisible_by=128"],
        "make_vocab_size_divisible_by 128 pads 152064 rows to 152576, vLLM to 152064\n    try: 1 or 2 or 4",
    ),
    "one stage": (
        [TRAIN + "num_layers_in_first_pipeline_stage=20"],
        "num_layers_in_first_pipeline_stage 20, but there is one stage\n    try: leave it out, or pipeline_parallel 2",
    ),
    "layers that are not there": (
        [TRAIN + "pipeline_parallel=2", TRAIN + "num_layers_in_last_pipeline_stage=64"],
        "num_layers_in_last_pipeline_stage 64 of 64 layers (Qwen2.5-VL-32B) leave no layer for each other stage",
    ),
    "layers that no stage has": (
        [TRAIN + "pipeline_parallel=2", FIRST + "=30", TRAIN + "num_layers_in_last_pipeline_stage=30"],
        "num_layers_in_first_pipeline_stage 30 and num_layers_in_last_pipeline_stage 30 of 64 layers (Qwen2.5-VL-32B) "
        "leave 4 that no stage has\n    try: num_layers_in_first_pipeline_stage 34",
    ),
    "stages that do not come out": (
        [TRAIN + "pipeline_parallel=4", FIRST + "=14"],
        "num_layers_in_first_pipeline_stage 14 of 64 layers (Qwen2.5-VL-32B) leave 50, which 3 stages do not share "
        "evenly\n    try: num_layers_in_first_pipeline_stage 16",
    ),
    "no stages of fsdp": (
        ["schedule=serial", TRAIN + "engine=fsdp", FIRST + "=14"],
        "engine fsdp has no num_layers_in_first_pipeline_stage\n    try: leave it out",
    ),
    "q with stages": (
        [TRAIN + "tensor_parallel=2", TRAIN + "pipeline_parallel=4"],
        "q = 2 / 4 = 1/2: a rollout shard is made of whole training shards",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_degrees_that_cannot_be_are_refused(case: str, tmp_path: Path) -> None:
    overrides, message = REFUSED[case]
    four_nodes = edited(("nodes: 1", "nodes: 4"))
    assert message in str(refusal(tmp_path, four_nodes, *overrides))


def test_the_host_engine_trains_whole_models() -> None:
    with pytest.raises(JobError, match="engine host has no pipeline_parallel: it trains whole models"):
        load_job("examples/jobs/shapes_host.yaml", [TRAIN + "pipeline_parallel=2"])


def test_make_vocab_size_divisible_by_64_agrees_at_tp8(tmp_path: Path) -> None:
    """152064 = 297 x 512: Megatron's 64 x TP 8 and vLLM's 64 give the same rows; 128 does up to TP 4."""
    for multiple, tp in ((64, 8), (128, 4)):
        overrides = [f"{TRAIN}make_vocab_size_divisible_by={multiple}", f"{TRAIN}tensor_parallel={tp}"]
        load_job(write(tmp_path, GOOD), overrides)


def test_tensor_parallelism_over_two_nodes_is_told_not_refused() -> None:
    """TP 16 on nodes of 8 is a public working configuration; its collectives cross the network."""
    overrides = ["model.name=Qwen2-72B", "workload.frames=0", TRAIN + "tensor_parallel=16"]
    overrides += ["roles.reference.score.tensor_parallel=16", "roles.actor.rollout.kv_cache_gib=60"]
    notes = load_job(X32, [*overrides, "cluster.capacity_gib=139"]).notes()
    assert any("roles.actor.train: tensor_parallel 16 crosses nodes of 8 GPUs" in n for n in notes)


# ---- sizes


def test_the_distributed_optimizer_keeps_a_share_and_gathers_the_rest() -> None:
    """DP 4: gradients whole (4 bytes), masters and moments a quarter (12 / 4): 6 + 12/DP with the BF16 weights."""
    plan = compiled(X32, TRAIN + "distributed_optimizer=true")
    held = load_job(X32).spec.rank_parameters(8, "language")
    sizes = {name: plan.object(f"actor.{name}").bytes for name in ("gradients", "master", "moments")}
    assert sizes["gradients"] == pytest.approx(4 * held, abs=PAGE)
    assert sizes["master"] == pytest.approx(4 * held / 4, abs=PAGE)
    assert sizes["moments"] == pytest.approx(8 * held / 4, abs=PAGE)
    steps = [s for s in plan.programs["train"] if isinstance(s, Exchange)]
    assert [(s.group, s.op, s.object) for s in steps] == [
        ("dp", "reduce_scatter", "actor.gradients"),
        ("dp", "all_gather", "actor.snapshot"),
        ("q", "write", "actor.snapshot"),
    ]
    assert steps[1].nbytes == pytest.approx(2 * held * 3 / 4, abs=8)
    assert "actor distributed_optimizer" in plan.not_executable


def test_pipeline_stages_halve_states_and_widen_the_gather() -> None:
    """TP 8, PP 2: half the layers' states; a rollout shard at TP 4 is made of 4 training slabs, 3 of them received."""
    one, two = compiled(X32), compiled(X32, TRAIN + "pipeline_parallel=2")
    spec = load_model("Qwen2.5-VL-32B")
    layers = (spec.language_parameters - 2 * spec.vocab * spec.hidden - spec.hidden) // 64
    half = 32 * layers // 8 + spec.vocab * spec.hidden // 8
    assert two.object("actor.gradients").bytes == pytest.approx(4 * half, rel=1e-3)
    assert two.object("actor.snapshot").bytes == one.object("actor.snapshot").bytes
    assert two.object("actor.boundary").bytes == one.object("actor.boundary").bytes  # twice the prompts
    layout = two.summary.layout
    assert layout.q == 2
    shard_of_layers, shard_of_ends = 2 * 64 * layers // 4, 2 * 2 * spec.vocab * spec.hidden // 4
    # Each stage has half of its own end, embedding or head, and nothing of the other.
    assert layout.exchange_bytes_per_gpu == pytest.approx((shard_of_layers + shard_of_ends) * 3 / 4, rel=1e-4)
    assert {c.group for c in layout.classes} == {4}
    assert "actor pipeline_parallel 2" in two.not_executable


def test_a_first_stage_with_fewer_layers() -> None:
    """TP 4, PP 4: 10 layers beside embedding and tower, 18 on each other stage; the head is on the last."""
    uneven = compiled(X32, TRAIN + "tensor_parallel=4", TRAIN + "pipeline_parallel=4", FIRST + "=10")
    spec = load_model("Qwen2.5-VL-32B")
    end = spec.vocab * spec.hidden
    layers = (spec.language_parameters - 2 * end - spec.hidden) // 64
    fullest, emptiest = (18 * layers + end) // 4, 10 * layers // 4 + end // 4
    assert uneven.object("actor.gradients").bytes == pytest.approx(4 * fullest, rel=1e-3)
    shard = spec.rank_parameters(4, "language")
    assert uneven.summary.layout.exchange_bytes_per_gpu == pytest.approx(2 * (shard - emptiest), rel=1e-4)
    work = role_work(
        load_job(X32, [TRAIN + "tensor_parallel=4", TRAIN + "pipeline_parallel=4", FIRST + "=10"]), "actor"
    )
    assert work.stages == (10, 18, 18, 18)
    assert work.layers_in_flight == 3 * 18  # the second stage keeps three steps of 18 layers, the first four of 10
    assert ways(work) == pytest.approx(4 * (64 / 18) * 16 / 19)
    assert any("pipeline stage of 10, 18, 18, 18 layers that holds most" in n for n in load_job(X32, [
        TRAIN + "pipeline_parallel=4", FIRST + "=10"]).notes())  # fmt: skip


def test_layers_that_do_not_divide_are_planned_with_a_first_stage_of_their_own() -> None:
    """235B-A22B: 94 layers over 4 stages are refused, and with 22 on the first not."""
    big = ["model.name=Qwen3-VL-235B-A22B", TRAIN + "tensor_parallel=4", TRAIN + "pipeline_parallel=4"]
    big += ["roles.reference.score.tensor_parallel=4", "roles.actor.rollout.kv_cache_gib=8", "cluster.nodes=8"]
    big += ["workload.prompts=64", "workload.max_pixels=null"]
    with pytest.raises(JobError, match=r"does not divide the 94 layers .*\n.*num_layers_in_first_pipeline_stage 22"):
        load_job(X32, big)
    layout = compiled(X32, *big, FIRST + "=22", TRAIN + "expert_parallel=4").summary.layout
    assert {c.name: c.group for c in layout.classes if c.name in ("o", "expert_down")} == {"o": 4, "expert_down": 16}


def test_context_ranks_cut_tokens_and_reduce_gradients() -> None:
    """CP 2 of DP 4: twice the prompts, half of each one's tokens; gradients are reduced over 4 ranks all the same."""
    plain, cut = compiled(X32), compiled(X32, TRAIN + "context_parallel=2")
    assert cut.processes["train"].data_parallel == 2
    assert cut.object("actor.boundary").bytes == plain.object("actor.boundary").bytes
    assert cut.object("actor.gradients").bytes == plain.object("actor.gradients").bytes
    assert cut.object("train.activations").bytes < plain.object("train.activations").bytes
    assert any(s.group == "dp" for s in cut.programs["train"] if isinstance(s, Exchange))


MOE = ["model.name=Qwen3-VL-30B-A3B", TRAIN + "tensor_parallel=4", "roles.reference.score.tensor_parallel=4"]
MOE += ["roles.actor.rollout.kv_cache_gib=20"]


def test_experts_are_cut_over_the_replicas() -> None:
    """30B-A3B, TP 4, EP 8: an eighth of the experts' gradients a rank; vLLM's shard has all, gathered over 8."""
    whole, cut = compiled(X32, *MOE), compiled(X32, *MOE, TRAIN + "expert_parallel=8")
    spec = load_model("Qwen3-VL-30B-A3B")
    assert spec.moe is not None
    experts = 48 * 128 * 3 * spec.hidden * spec.moe.ffn // 4
    saved = whole.object("actor.gradients").bytes - cut.object("actor.gradients").bytes
    assert saved == pytest.approx(4 * experts * 7 / 8, abs=PAGE)
    assert whole.summary.layout.exchange_bytes_per_gpu == 0
    assert cut.summary.layout.exchange_bytes_per_gpu == pytest.approx(2 * experts * 7 / 8, rel=1e-6)
    assert whole.object("actor.snapshot").bytes == cut.object("actor.snapshot").bytes
    assert "actor expert_parallel 8" in cut.not_executable


# ---- faults: what the checker must see


def without(plan: Plan, group: str, op: str) -> Plan:
    steps = [s for s in plan.programs["train"] if not (isinstance(s, Exchange) and (s.group, s.op) == (group, op))]
    assert len(steps) == len(plan.programs["train"]) - 1
    return plan.model_copy(update={"programs": {**plan.programs, "train": tuple(steps)}})


def rules_broken(plan: Plan) -> set[str]:
    return {v.kind for v in check_plan(plan)}


@pytest.fixture(scope="module")
def sharded() -> Plan:
    return compiled(X32, *MOE, TRAIN + "expert_parallel=8", TRAIN + "distributed_optimizer=true")


def test_a_sound_plan_passes(sharded: Plan) -> None:
    assert not rules_broken(sharded)


@pytest.mark.parametrize(("group", "op"), [("dp", "reduce_scatter"), ("dp", "all_gather"), ("q", "write")])
def test_a_missing_collective_is_found(sharded: Plan, group: str, op: str) -> None:
    """Gradients of one replica, new weights of one share, experts of one rank: each would train on stale weights."""
    assert "missing-exchange" in rules_broken(without(sharded, group, op))


def test_a_layout_that_forgets_ranks_is_found(sharded: Plan) -> None:
    """A layout in which nothing is received, and no gather: a rank with 16 of 128 experts cannot serve them all."""
    layout = sharded.summary.layout.model_copy(update={"exchange_bytes_per_gpu": 0, "classes": ()})
    summary = sharded.summary.model_copy(update={"layout": layout})
    plan = without(sharded, "q", "write").model_copy(update={"summary": summary})
    assert "missing-exchange" in rules_broken(plan)


def test_chunks_must_reach_the_end_of_a_share(sharded: Plan) -> None:
    """The last chunk ends a page early: elements of the rank's share are left out."""
    steps = list(sharded.programs["train"])
    last = max(i for i, s in enumerate(steps) if s.kind == "update_chunk")
    steps[last] = steps[last].model_copy(update={"stop": steps[last].stop - PAGE})  # pyright: ignore[reportAttributeAccessIssue]
    plan = sharded.model_copy(update={"programs": {**sharded.programs, "train": tuple(steps)}})
    assert "chunk-cover" in rules_broken(plan)


# ---- times


def test_a_token_meets_the_experts_it_is_sent_to() -> None:
    """30B-A3B and 235B-A22B are named after what one token meets, in billions."""
    assert load_model("Qwen3-VL-30B-A3B").active_parameters / 1e9 == pytest.approx(3.3, abs=0.1)
    assert load_model("Qwen3-VL-235B-A22B").active_parameters / 1e9 == pytest.approx(22, abs=0.3)
    dense = load_model("Qwen2.5-7B")
    assert dense.active_parameters == dense.language_parameters


def test_a_pipeline_fills_and_drains() -> None:
    """16 steps through 4 stages take 19 slots (Narayanan et al. 2021): a bubble of 3/16 on top."""
    work = role_work(load_job(X32, [TRAIN + "tensor_parallel=4", TRAIN + "pipeline_parallel=4"]), "actor")
    assert work.steps == 16
    assert ways(work) == pytest.approx(4 * 4 * 16 / 19)


@pytest.mark.parametrize(("key", "value"), [("recompute", "selective"), ("attention", "unfused")])
def test_the_host_engine_has_one_kind_of_attention(key: str, value: str) -> None:
    with pytest.raises(JobError, match=f"engine host has no {key} {value}"):
        load_job("examples/jobs/shapes_host.yaml", [f"roles.actor.{key}={value}"])
