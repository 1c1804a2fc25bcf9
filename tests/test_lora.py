"""LoRA: the matrices of every model against torch, their cut, what a plan keeps of them, what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import golden
import pytest
import torch

from rollplex.backends import activations
from rollplex.ir.adapters import TARGETS
from rollplex.ir.checker import check_plan
from rollplex.ir.errors import JobError
from rollplex.ir.job import Job, load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.lora import served_bytes, trained_spec
from rollplex.ir.models import load_model, model_names
from rollplex.ir.plan import Plan, PlannedObject
from rollplex.ir.shards import Degrees, owned_parameters, rank_parameters
from rollplex.ir.spec import Adapters, ModelSpec
from rollplex.ir.steps import Exchange, Rebuild, Run, UpdateChunk
from rollplex.ir.work import role_work
from rollplex.passes.costs import ADAPTER_LAUNCH_S, Costs
from rollplex.passes.pipeline import compile_plan
from rollplex.show.page import plan_page

GRPO = load_algorithm("examples/grpo.py")
NODE, CLUSTER = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", "examples/jobs/qwen2_5_vl_32b_h800x32.yaml"
EXAMPLE, FSDP = "examples/jobs/lora_72b_h800x8.yaml", "tests/cases/works_fsdp_7b_h800x2.yaml"
LORA, MERGED = "roles.actor.lora={rank: 64}", "roles.actor.lora={rank: 64, served: merged}"
FUSED = frozenset({"qkv", "gate_up", "expert_gate_up"})
PAGE = 2 << 20


@cache
def plan(job: str, *overrides: str) -> Plan:
    return compile_plan(GRPO, load_job(job, overrides))


def held(made: Plan, name: str, nbytes: float) -> bool:
    """Whether an object has these bytes, rounded up to pages."""
    return 0 <= made.object(name).bytes - nbytes < PAGE


def names(made: Plan) -> set[str]:
    return {o.name for o in made.summary.objects}


# ---- how many


def pair(rank: int, inputs: int, outputs: int) -> torch.nn.ModuleList:
    """A and B as torch has them."""
    return torch.nn.ModuleList([torch.nn.Linear(inputs, rank, bias=False), torch.nn.Linear(rank, outputs, bias=False)])


def in_torch(spec: ModelSpec, rank: int, targets: tuple[str, ...], fused: bool) -> int:
    """Parameters of the pairs, written down layer by layer from the model's dimensions, and counted by torch."""
    h, q, kv = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    total = 0
    with torch.device("meta"):
        for layer in range(spec.layers):
            moe = spec.moe if spec.moe and layer not in spec.moe.dense_layers else None
            ffn, experts = (moe.ffn, moe.experts) if moe else (spec.ffn, 1)
            pairs = {
                "qkv": [pair(rank, h, q + 2 * kv)] if fused else [pair(rank, h, n) for n in (q, kv, kv)],
                "o": [pair(rank, q, h)],
                "gate_up": [pair(rank, h, 2 * ffn)] if fused else [pair(rank, h, ffn) for _ in range(2)],
                "down": [pair(rank, ffn, h)],
            }
            for target in targets:
                count = sum(p.numel() for m in pairs[target] for p in m.parameters())
                total += count * (experts if target in ("gate_up", "down") else 1)
    return total


@pytest.mark.parametrize("fused", [True, False], ids=["a pair a fused weight", "a pair a projection"])
@pytest.mark.parametrize("name", model_names())
def test_adapters_of_every_model_as_torch_counts_them(name: str, fused: bool) -> None:
    spec = load_model(name)
    for targets in (TARGETS, ("qkv",), ("o", "down")):
        adapters = replace(spec, adapters=Adapters(8, targets, FUSED if fused else frozenset()))
        assert adapters.language_parameters == in_torch(spec, 8, targets, fused)
        assert adapters.vision_parameters == 0


def test_a_matrix_at_a_time() -> None:
    """Qwen2.5-VL-72B, rank 64: layer 0 fused, and as separate projections."""
    spec = load_model("Qwen2.5-VL-72B")
    fused = replace(spec, adapters=Adapters(64, TARGETS, FUSED)).tensors()[:8]
    assert [t.shape for t in fused] == [
        (64, 8192), (8192 + 2 * 1024, 64), (64, 8192), (8192, 64),
        (64, 8192), (2 * 29568, 64), (64, 29568), (8192, 64),
    ]  # fmt: skip
    apart = replace(spec, adapters=Adapters(64, ("qkv",))).tensors()[:6]
    assert [t.shape for t in apart] == [(64, 8192), (8192, 64), (64, 8192), (1024, 64), (64, 8192), (1024, 64)]


# ---- cut over ranks


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_training_rank_holds_its_part_of_both_matrices(tp: int) -> None:
    """Column-parallel: A along r, B along out. Row-parallel: A along in, B along out. Megatron-Bridge."""
    spec, r = load_model("Qwen2.5-VL-32B"), 64
    h, q, kv, f = 5120, 40 * 128, 8 * 128, 27648
    column = sum(r // tp * h + out // tp * r for out in (q + 2 * kv, 2 * f))
    row = sum(r * (inner // tp) + h // tp * r for inner in (q, f))
    adapters = replace(spec, adapters=Adapters(r, TARGETS, FUSED))
    assert rank_parameters(adapters, Degrees(tp=tp), "language") == 64 * (column + row)
    assert owned_parameters(adapters, Degrees(tp=tp, dp=4), "language") == -(-64 * (column + row) // 4)


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_a_rollout_rank_has_one_side_whole(tp: int) -> None:
    """vLLM: A of q, k, v, gate and up on every rank, B of o and down; KV rows as the layer has them."""
    spec, r = load_model("Qwen2.5-VL-7B"), 32
    h, q, kv, f = 3584, 28 * 128, 4 * 128, 18944
    rows = [q // tp, *[kv // min(tp, 4)] * 2, f // tp, f // tp]
    column = sum(r * h + out * r for out in rows)
    row = sum(r * (inner // tp) + h * r for inner in (q, f))
    if spec.heads % tp == 0:
        adapters = replace(spec, adapters=Adapters(r, TARGETS, split=False))
        assert adapters.rank_parameters(tp, "language") == 28 * (column + row)


def test_experts_have_a_pair_each_and_are_dealt_out() -> None:
    spec, r, tp, ep = load_model("Qwen3-VL-30B-A3B"), 16, 2, 4
    assert spec.moe is not None
    h, q, kv, f, experts = 2048, 32 * 128, 4 * 128, 768, 128
    dense = r // tp * h + (q + 2 * kv) // tp * r + r * q // tp + h // tp * r
    routed = r // tp * h + 2 * f // tp * r + r * (f // tp) + h // tp * r
    adapters = replace(spec, adapters=Adapters(r, TARGETS, FUSED))
    degrees = Degrees(tp=tp, ep=ep, dp=8)
    assert rank_parameters(adapters, degrees, "language") == 48 * (dense + experts // ep * routed)
    per_token = 48 * (tp * dense + 8 * tp * routed)  # eight experts a token
    assert adapters.active_parameters == per_token
    served = replace(spec, adapters=Adapters(r, TARGETS, split=False))
    column = r * h * 3 + (q // tp + 2 * kv // tp) * r + r * q // tp + h * r
    stacked = experts * (2 * (r * h + f // tp * r) + r * f // tp + h * r)
    assert served.rank_parameters(tp, "language") == 48 * (column + stacked)


def test_a_stage_has_the_adapters_of_its_layers() -> None:
    adapters = replace(load_model("Qwen2.5-VL-32B"), adapters=Adapters(64, TARGETS, FUSED))
    whole, half = (rank_parameters(adapters, Degrees(tp=8, pp=pp), "language") for pp in (1, 2))
    assert whole == 2 * half


# ---- what a plan keeps


def test_the_example_fits_and_is_printed() -> None:
    made = plan(EXAMPLE)
    assert made.feasible
    assert check_plan(made) == ()
    page = "\n".join(text.plain for text in plan_page(made, Path(EXAMPLE).name))
    golden.check("plan_lora.txt", page + "\n")


def test_without_adapters_the_same_job_does_not_fit() -> None:
    assert not plan(EXAMPLE, "roles.actor.lora=null").feasible
    assert not plan(EXAMPLE, "roles.actor.lora.served=merged").feasible


def test_states_are_those_of_adapters() -> None:
    """72B at TP 8, rank 64: 2 bytes a base weight; a parameter of the adapters takes 2 + 4 + 4 + 8."""
    made = plan(EXAMPLE)
    per_layer = 64 * (8192 + 10240 + 8192 + 8192 + 8192 + 59136 + 29568 + 8192)
    rank = 80 * per_layer // 8
    assert held(made, "actor.base", 2 * load_model("Qwen2.5-VL-72B").rank_parameters(8, "language"))
    assert held(made, "actor.snapshot", 2 * rank)
    assert held(made, "actor.gradients", 4 * rank)
    assert held(made, "actor.master", 4 * rank)
    assert held(made, "actor.moments", 8 * rank)
    chunks = [s for s in made.programs["train"] if isinstance(s, UpdateChunk)]
    assert (chunks[0].start, chunks[-1].stop) == (0, rank)
    assert all(a.stop == b.start for a, b in pairwise(chunks))


def test_nothing_writes_the_base() -> None:
    """No chunk, gather or rebuild; the case-3 buffer of the stock order is there and stays."""
    made = plan(NODE, LORA)
    steps = [s for program in made.programs.values() for s in program]
    assert not any(isinstance(s, Rebuild) for s in steps)
    assert made.object("actor.case3").process == "rollout"
    assert made.summary.layout.case3_buffer_bytes > 0
    assert made.summary.layout.exchange_bytes_per_gpu == 0
    assert {s.object for s in steps if isinstance(s, Exchange)} == {"actor.snapshot", "rollout.adapters"}
    assert not any({"actor.base", "actor.case3"} & set(s.writes) for s in steps if isinstance(s, Run | UpdateChunk))
    assert "q2" not in made.object("train.context").why


def test_publication_moves_adapters_alone() -> None:
    """32B on vLLM at TP 4, rank 64: its stacked buffers, about 0.45 GiB, where the snapshot's exchange is 7.6 GiB."""
    made, r, tp = plan(NODE, LORA), 64, 4
    h, q, kv, f = 5120, 40 * 128, 8 * 128, 27648
    rows = (q // tp, kv // tp, kv // tp, f // tp, f // tp)
    expected = 2 * 64 * (sum(r * h + out * r for out in rows) + r * q // tp + h * r + r * f // tp + h * r)
    sent = {(s.group, s.nbytes) for s in made.programs["rollout"] if isinstance(s, Exchange)}
    assert sent == {("refresh", made.object("rollout.adapters").bytes)}
    assert held(made, "rollout.adapters", expected)
    assert plan(NODE).summary.layout.exchange_bytes_per_gpu > 10 * expected


def test_buffers_are_of_a_rank_that_the_engine_knows() -> None:
    assert served_bytes(load_job(NODE, ["roles.actor.lora={rank: 40}"])) == served_bytes(load_job(NODE, [LORA]))


# ---- who reads the base


def reading(made: Plan, role: str) -> set[str]:
    return {n for s in made.programs["train"] if isinstance(s, Run) and s.role == role for n in s.reads}


def test_a_reference_is_the_base_with_adapters_off() -> None:
    made = plan(NODE, LORA)
    assert "reference.weights" not in names(made)
    assert {"actor.base", "actor.vision"} <= reading(made, "reference")
    assert "actor.snapshot" not in reading(made, "reference")
    assert "reference: the same weights, adapters off" in made.object("actor.base").why


@pytest.mark.parametrize(
    "overrides",
    [
        ("roles.reference.score.tensor_parallel=4",),
        ("roles.reference.model=Qwen2.5-VL-7B", "roles.reference.score.tensor_parallel=4"),
        ("schedule=naive",),
    ],
    ids=["other degrees", "another model", "naive"],
)
def test_a_reference_that_is_not_keeps_its_own(overrides: tuple[str, ...]) -> None:
    made = plan(NODE, LORA, *overrides)
    assert "reference.weights" in names(made)
    assert "actor.base" not in reading(made, "reference")
    assert "adapters off" not in made.object("actor.base").why
    assert check_plan(made) == ()


# ---- merged


def test_merged_weights_are_a_second_copy() -> None:
    """The base stays at the trainer's shard; the rollout engine's copy is rewritten, and nothing is shared."""
    made, spec = plan(NODE, MERGED), load_model("Qwen2.5-VL-32B")
    assert "rollout.adapters" not in names(made)
    assert held(made, "actor.base", 2 * spec.rank_parameters(8, "language"))
    assert held(made, "rollout.weights", 2 * spec.rank_parameters(4, "language"))
    assert "merged at publication" in made.object("rollout.weights").why
    assert made.summary.layout.q == 0
    assert not any(o.readers for o in made.summary.objects)
    sent = [s for s in made.programs["rollout"] if isinstance(s, Exchange)]
    assert [(s.object, s.nbytes) for s in sent] == [("rollout.weights", made.object("rollout.weights").bytes)]


@pytest.mark.parametrize("served", ["adapter", "merged"])
def test_pools_of_their_own_have_the_base_twice(served: str) -> None:
    lora = f"roles.actor.lora={{rank: 64, served: {served}}}"
    made = plan(CLUSTER, lora, "schedule=disaggregated", "cluster.rollout_gpus=16")
    sent = {s.object for s in made.programs["rollout"] if isinstance(s, Exchange)}
    assert sent == {"rollout.adapters" if served == "adapter" else "rollout.weights"}
    assert {"actor.base", "rollout.weights"} <= names(made)


# ---- fsdp


def test_fully_sharded_adapters_are_their_own_masters() -> None:
    """ZeRO-3 on 2 GPUs: the base cut in bf16, adapters of separate projections in FP32 with gradient and moments."""
    made, spec = plan(FSDP, LORA), load_model("Qwen2-7B")
    share = -(-in_torch(spec, 64, TARGETS, fused=False) // 2)
    assert held(made, "actor.base", spec.language_parameters)  # 2 bytes over 2 ranks
    for name, nbytes in (("snapshot", 4), ("gradients", 4), ("moments", 8)):
        assert held(made, f"actor.{name}", nbytes * share), name
    assert "actor.master" not in names(made)
    assert "reference.weights" not in names(made)
    assert check_plan(made) == ()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("lora", [LORA, MERGED])
def test_every_stage_passes_the_checker(zero: int, lora: str) -> None:
    stages = [f"roles.{r}.zero={zero}" for r in ("actor.train", "reference.score")]
    made = plan(FSDP, lora, *stages, "workload.prompts=8")
    assert check_plan(made) == ()
    assert ("reference.weights" in names(made)) is False


# ---- layout


def classes(order: str, *overrides: str) -> dict[str, str]:
    return {c.name: c.view for c in plan(NODE, f"layout.order={order}", *overrides).summary.layout.classes}


def test_auto_keeps_the_stock_order_of_targets() -> None:
    assert classes("auto", LORA)["qkv"] == classes("stock", LORA)["qkv"] == "rebuild"
    assert classes("auto", LORA)["gate_up"] == "slabs"
    others = "roles.actor.lora={rank: 64, targets: [o, down]}"
    assert classes("reindex", others)["qkv"] == "reindex"


# ---- times and activations


def costs(*overrides: str) -> tuple[Costs, Job]:
    job = load_job(NODE, overrides)
    return Costs(job), job


def train_s(*overrides: str) -> float:
    found, job = costs(*overrides)
    return found.train_s(role_work(job, "actor"), 4)


@pytest.mark.parametrize(("recompute", "passes"), [("none", (2, 3)), ("full", (3, 4))])
def test_a_backward_has_no_gradient_of_base_weights(recompute: str, passes: tuple[int, int]) -> None:
    """Forward and gradients of inputs, where all of it is twice a forward more; adapters add about one in a hundred."""
    kept = f"roles.actor.recompute={recompute}"
    suffix = costs(kept)[0].suffix_s(role_work(costs(kept)[1], "actor"), 4)
    prompt = costs(kept)[0].prefix_s(replace(role_work(costs(kept)[1], "actor"), patches=0), 4)  # the tower is frozen
    ours, full = passes
    saved = (full - ours) * (suffix + prompt)
    added = train_s(kept, LORA) - (train_s(kept) - saved)
    job = load_job(NODE, [LORA])
    tokens, parameters = 4 * (8192 + 8 * 2048), trained_spec(job, "actor").parameters
    assert added == pytest.approx(6 * tokens * parameters / 8 / costs()[0].flops_per_s, rel=1e-6)
    assert added < 0.02 * train_s(kept)


def test_decode_reads_adapters_and_launches_two_gemms_a_target() -> None:
    found, job = costs(LORA)
    plain = costs()[0]
    weights, adapters = job.spec.rank_parameters(4, "language") * 2, served_bytes(job)
    steps = 2048
    added = found.decode_s(weights + adapters, 4, 16) - plain.decode_s(weights, 4, 16)
    assert added == pytest.approx(steps * (adapters / plain.hbm_bytes_per_s + 8 * 64 * ADAPTER_LAUNCH_S), rel=1e-6)


@pytest.mark.parametrize(("engine", "pairs"), [(FUSED, 4), (frozenset(), 7)], ids=["megatron", "fsdp"])
def test_what_a_gives_is_kept(engine: frozenset[str], pairs: int) -> None:
    """r numbers of a token and pair in every layer, cut by nothing."""
    work = role_work(load_job(NODE), "actor")
    kept = replace(work, adapters=Adapters(64, TARGETS, engine))
    added = activations.layers_bytes(kept, 8192, work.layers) - activations.layers_bytes(work, 8192, work.layers)
    assert added == 64 * pairs * 64 * 2


def test_a_share_of_memory_pays_for_adapters() -> None:
    share = ("roles.actor.rollout.kv_cache_gib=null", "roles.actor.rollout.gpu_memory_utilization=0.8")
    with_adapters, without = (load_job(NODE, [*more, *share]).kv_cache_bytes for more in ((LORA,), ()))
    taken = served_bytes(load_job(NODE, [LORA]))
    assert abs(without - with_adapters - taken) <= PAGE  # both are whole pages


# ---- what a job may not say

REFUSED = {
    "no rank": (("roles.actor.lora={}",), "`rank` is missing"),
    "an unknown target": (("roles.actor.lora={rank: 8, targets: [lm_head]}",), "expected one of qkv, o, gate_up, down"),
    "a target twice": (("roles.actor.lora={rank: 8, targets: [o, o]}",), "`targets`: o stands there more than once"),
    "not the policy": (
        ("roles.reference.lora={rank: 8}",),
        "adapters of `reference`: only the policy, here `actor`, is trained through adapters",
    ),
    "language frozen": (
        (LORA, "roles.actor.freeze=[language]"),
        "the adapters are the language model's, and freeze says that it is not trained\n    try: freeze: [vision]",
    ),
    "rank and ranks": (
        ("roles.actor.lora={rank: 12}",),
        "rank 12 is not divided by tensor_parallel 8: every rank holds a part of A's rows\n    try: rank 16",
    ),
    "no low rank": (
        ("roles.actor.lora={rank: 5120, served: merged}",),
        "rank 5120 is no low rank: Qwen2.5-VL-32B has a hidden size of 5120",
    ),
    "more than vLLM serves": (
        ("roles.actor.lora={rank: 1024}",),
        "vllm serves adapters of rank 512 at most, this has 1024\n    try: a smaller rank, or served: merged",
    ),
    "re-indexed": (
        (LORA, "layout.order=reindex"),
        "order reindex, but vllm's LoRA adds to qkv and gate_up in its own row order",
    ),
    "merged, and sharing off": (
        (MERGED, "ablate=[weight_sharing]"),
        "ablate has weight_sharing, but with adapters served merged no weights are shared",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    overrides, message = REFUSED[name]
    with pytest.raises(JobError) as refused:
        load_job(NODE, overrides)
    assert message in str(refused.value)


def test_the_host_engine_has_none() -> None:
    with pytest.raises(JobError, match="engine host has no lora: it trains whole weights"):
        load_job("examples/jobs/shapes_host.yaml", ["roles.actor.lora={rank: 8}"])


def test_a_cut_that_no_tensor_divides() -> None:
    """q, k and v of 8 + 2 x 2 heads of 7 numbers are 84 rows."""
    config = {
        "model_type": "llama", "hidden_size": 56, "num_hidden_layers": 1, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 64,
    }  # fmt: skip
    text = f"model={{name: odd, config: {config}}}".replace("'", "")
    fewer = ("roles.actor.lora={rank: 8}", "roles.actor.rollout.tensor_parallel=8", "workload.frames=0", text)
    with pytest.raises(JobError, match=r"tensor_parallel 8 does not divide model.layers.0.self_attn.qkv.lora_B"):
        load_job(NODE, fewer)


def test_the_tower_is_frozen_with_the_base() -> None:
    assert load_job(NODE, [LORA, "roles.actor.freeze=[]"]).roles["actor"].freeze == ("vision",)
    tower: PlannedObject = plan(NODE, LORA, "roles.actor.freeze=[]").object("actor.vision")
    assert "P3 update" not in tower.consumed
