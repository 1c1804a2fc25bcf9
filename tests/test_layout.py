"""The layout pass: paper section 4.4's coverage, every case by a small picture, and optimality by brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from rollplex.backends.facts import Block
from rollplex.backends.ordering import grouped, stacked
from rollplex.ir.job import Job, load_job
from rollplex.ir.models import load_model
from rollplex.ir.module import Module
from rollplex.ir.planned_layout import LayoutClass, LayoutSummary
from rollplex.passes.layout import FAMILIES, Layout, LayoutPass, Model
from rollplex.passes.layout_options import Option, View, WeightClass
from rollplex.passes.slabs import Slab, missing, parts, same_rows, slabs
from rollplex.passes.solver import constrain, minimise

JOB = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"


def solve(job: Job) -> Layout:
    return LayoutPass().run(Module(None, job, None))[Layout]  # type: ignore[arg-type]


def summary(*overrides: str) -> LayoutSummary:
    return solve(load_job(JOB, overrides)).summary


def by_name(found: LayoutSummary) -> dict[str, LayoutClass]:
    return {c.name: c for c in found.classes}


def shares(found: LayoutSummary) -> list[float]:
    total = sum(c.params for c in found.cases.values())
    return [round(100 * found.cases[k].params / total, 2) for k in "123"]


def degrees(train: int, rollout: int, model: str = "Qwen2.5-VL-32B") -> tuple[str, ...]:
    """Overrides for other degrees, a model of the registry, and one prompt a rank and engine."""
    return (
        f"model={model}",
        f"roles.actor.train.tensor_parallel={train}", f"roles.reference.score.tensor_parallel={train}",
        f"roles.actor.rollout.tensor_parallel={rollout}", "roles.actor.rollout.kv_cache_gib=60",
        "workload.prompts=8", "workload.group=1",
    )  # fmt: skip


# ---- coverage


def test_coverage_of_the_32b_model_is_the_papers() -> None:
    """60.0 / 32.8 / 7.2 % in the paper; 19.677 / 10.737 / 2.349 B parameters by arithmetic; buffer 1.09 GiB."""
    found = summary()
    assert {k: round(c.params / 1e9, 3) for k, c in found.cases.items()} == {"1": 19.677, "2": 10.737, "3": 2.349}
    assert sum(c.params for c in found.cases.values()) == load_model("Qwen2.5-VL-32B").language_parameters
    assert shares(found) == [60.06, 32.77, 7.17]
    assert round(found.case3_buffer_bytes / 2**30, 2) == 1.09


def test_the_buffer_is_85_percent_smaller_than_a_second_copy() -> None:
    """Paper: 85.5 % smaller than duplicating the 7.6 GiB training shard."""
    spec = load_model("Qwen2.5-VL-32B")
    copy = spec.rank_parameters(8, "language") * 2
    assert round(100 * (1 - summary().case3_buffer_bytes / copy), 1) == 85.7
    assert round(100 * (1 - 1.1 / 7.6), 1) == 85.5


def test_the_stock_order_says_what_the_trainer_must_be_able_to_do() -> None:
    """Megatron has one [2f, H] parameter; with q = 2 its gate and its up lie apart in vLLM's shard."""
    gate_up = by_name(summary())["gate_up"]
    assert (gate_up.case, gate_up.view, gate_up.slabs) == (1, "slabs", 2)
    assert "gate and up lie in 2 slabs: the trainer holds them as two views" in gate_up.why
    assert "megatron: gate_up as two parameters; its own single [2f, H] cannot alias" in summary().needs
    assert by_name(summary(*degrees(4, 4)))["gate_up"].view == "alias"


def test_re_indexing_leaves_nothing_to_rebuild() -> None:
    """QKV in Megatron's order, gate and up interleaved by training rank: one slab each, no buffer."""
    found = summary("layout.order=reindex")
    assert shares(found) == [67.23, 32.77, 0.0]
    assert found.case3_buffer_bytes == 0
    classes = by_name(found)
    assert [classes[n].view for n in ("qkv", "gate_up", "o", "down")] == [
        "reindex", "interleave", "transpose", "transpose",
    ]  # fmt: skip
    assert {c.slabs for c in found.classes} == {1}
    assert "3,584 B a token and layer" in classes["qkv"].why  # 14 heads of 128 in bf16


def test_each_order_tells_what_the_other_would_give() -> None:
    """A plan in stock order prints the re-indexed result beside it, and the other way round."""
    stock, reindex = summary(), summary("layout.order=reindex")
    assert [(a.order, a.case3_buffer_bytes) for a in stock.alternatives] == [("reindex", 0)]
    assert [(a.order, a.case3_buffer_bytes) for a in reindex.alternatives] == [("stock", stock.case3_buffer_bytes)]
    assert [a.order for a in summary("layout.order=auto").alternatives] == ["stock", "reindex"]


def test_one_kv_group_a_rank_needs_nothing() -> None:
    """TP 8 -> 8 with 8 KV heads, TP 4 -> 4 and 8 -> 4 with 4: Megatron's order and vLLM's are the same bytes."""
    for overrides in (degrees(8, 8), degrees(4, 4, "Qwen2.5-VL-7B"), degrees(8, 4, "Qwen3-VL-30B-A3B")):
        qkv = by_name(summary(*overrides))["qkv"]
        assert (qkv.view, qkv.slabs, qkv.needs) == ("alias", 1, "")


def test_repeated_kv_heads_are_rebuilt_in_any_order() -> None:
    """4 KV heads on 8 rollout ranks: each rank needs K and V rows that another training rank owns."""
    for order in ("stock", "reindex", "auto"):
        found = by_name(summary(*degrees(8, 8, "Qwen3-VL-30B-A3B"), f"layout.order={order}"))["qkv"]
        assert (found.case, found.view) == (3, "rebuild")
        assert "8 ranks, 4 KV heads: vllm repeats KV rows on its ranks" in found.why
        assert found.receives_bytes > 0  # with q = 1 too
    assert summary(*degrees(8, 8, "Qwen3-VL-30B-A3B")).exchange_bytes_per_gpu == found.receives_bytes


def test_stacked_experts_stay_in_vllms_own_form() -> None:
    """vLLM's fused experts split gate and up themselves and want w2 contiguous: slabs, and a rebuilt w2."""
    found = summary(*degrees(8, 4, "Qwen3-VL-30B-A3B"), "layout.order=reindex")
    classes = by_name(found)
    gate_up, down = classes["expert_gate_up"], classes["expert_down"]
    assert (gate_up.view, gate_up.slabs, gate_up.pieces) == ("slabs", 2, 128)
    assert (down.view, down.case) == ("rebuild", 3)
    assert "vllm cannot read expert_down transposed" in down.why
    placed = {t.name: t.slabs for t in found.tensors if "experts.gate_up" in t.name}
    assert set(placed.values()) == {256}
    assert by_name(summary(*degrees(8, 8, "Qwen3-VL-30B-A3B")))["expert_down"].view == "alias"


def test_a_tied_embedding_is_one_class_and_small_norms_are_replicated() -> None:
    """3B: the head is the embedding; Qwen3's q and k norms lie on every rank as they are."""
    tied, normed = (by_name(summary(*degrees(2, 1, m))) for m in ("Qwen2.5-VL-3B", "Qwen3-VL-8B"))
    assert "head" not in tied
    assert tied["embed"].view == "alias"
    assert {normed[n].view for n in ("q_norm", "k_norm", "norm")} == {"alias"}
    assert normed["q_norm"].receives_bytes == 0


# ---- time and memory: auto


def test_auto_gives_time_for_memory_where_decode_reads_much() -> None:
    """32B: re-indexing costs 67 ms of a decode of 88 s, and 1.09 of 79.1 GiB for that long are worth more."""
    found = summary("layout.order=auto")
    assert by_name(found)["qkv"].view == "reindex"
    assert found.case3_buffer_bytes == 0


def test_auto_rebuilds_where_tokens_are_many_and_contexts_short() -> None:
    """3B, 2048 short prompts x 8 on one node: gathers of millions of tokens outweigh a buffer of 0.2 GiB."""
    short = (
        "model=Qwen2.5-VL-3B", "layout.order=auto", "roles.actor.train.tensor_parallel=2",
        "roles.reference.score.tensor_parallel=2", "roles.actor.rollout.tensor_parallel=1", "workload.prompts=2048",
        "workload.prompt_tokens=64", "workload.response_tokens=512", "roles.actor.rollout.kv_cache_gib=60",
    )  # fmt: skip
    found = by_name(summary(*short))["qkv"]
    assert (found.view, found.decode_s) == ("rebuild", 0.0)
    assert by_name(summary(*short, "layout.order=reindex"))["qkv"].decode_s > 0.1


# ---- placement and exchange


def test_rank_placement_lets_every_gpu_own_a_slab_of_its_rollout_rank() -> None:
    """TP8 -> TP4: engine 0 on GPUs 0 2 4 6, engine 1 on 1 3 5 7 (GPU of training rank g hosts rollout rank g // 2)."""
    assert summary().placement == {"engine 0": (0, 2, 4, 6), "engine 1": (1, 3, 5, 7)}
    assert summary(*degrees(4, 2)).placement == {"engine 0": (0, 2), "engine 1": (1, 3)}
    assert summary(*degrees(4, 2)).groups == 2


def test_an_update_exchanges_the_other_half_of_every_sharded_tensor() -> None:
    """q = 2: a GPU owns half of the rollout shard's sharded tensors and receives the other half, class by class."""
    job = load_job(JOB)
    spec, found = job.spec, summary()
    sharded = sum(spec.shard_numel(t, 4) for t in spec.tensors() if t.axis is not None)
    assert found.exchange_bytes_per_gpu == sharded * 2 // 2
    for c in found.classes:
        assert c.sends_bytes == c.receives_bytes == (c.shard_bytes // 2 if c.name != "norm" else 0)
    assert found.exchange_s == pytest.approx(found.exchange_bytes_per_gpu / (400e9 * 0.4), rel=1e-3)


def test_equal_degrees_share_everything_but_the_reordered_qkv() -> None:
    """TP4 on both sides: only the order of QKV rows differs."""
    found = summary(*degrees(4, 4))
    assert found.cases["3"].params == 2349268992
    assert found.cases["2"].params == found.exchange_bytes_per_gpu == 0
    assert summary(*degrees(4, 4), "layout.order=reindex").cases["3"].params == 0


# ---- row orders


def blocks(text: str) -> list[Block]:
    """`q0:2 k0:1` -> blocks."""
    found = (word.partition(":") for word in text.split())
    return [Block(head[0], int(head[1:]), int(stop)) for head, _, stop in found]


@pytest.mark.parametrize(
    ("inner", "outer", "runs"),
    [
        ("g0:2", "g0:4", [(0, 2)]),
        ("g2:4", "g0:4", [(2, 2)]),
        ("g0:2 u0:2", "g0:4 u0:4", [(0, 2), (4, 2)]),
        ("g2:4 u0:4", "g0:4 u0:4", [(2, 6)]),
        ("g0:4 u0:4", "g0:4 u0:4", [(0, 8)]),
        ("g0:2 u0:2", "g0:2 u0:2 g2:4 u2:4", [(0, 4)]),
        ("g0:4", "g0:2 u0:2 g2:4 u2:4", [(0, 2), (4, 2)]),
        ("q0:2 k0:1 v0:1", "q0:4 k0:2 v0:2", [(0, 2), (4, 1), (6, 1)]),
        ("g0:5", "g0:4", None),
        ("v0:1", "g0:4", None),
    ],
)
def test_slabs_of_row_orders(inner: str, outer: str, runs: list[tuple[int, int]] | None) -> None:
    """A training shard's rows, in its order, as runs of the rollout shard."""
    found = slabs(blocks(inner), blocks(outer))
    assert found == (None if runs is None else tuple(Slab(*r) for r in runs))


def test_rows_of_shards() -> None:
    assert same_rows(blocks("g0:2 u0:2"), blocks("u0:2 g0:2"))
    assert not same_rows(blocks("g0:2 u0:2"), blocks("g0:2 u0:1"))
    assert missing(blocks("q0:4 k0:1"), blocks("q2:6")) == 3
    assert parts(blocks("q0:2 k0:1 q2:4")) == 2


@pytest.mark.parametrize("order", [stacked, grouped])
@pytest.mark.parametrize("fused", ["qkv", "gate_up"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_engine_order_covers_every_row_once(order, fused: str, tp: int) -> None:
    """Over all ranks, the blocks of a fused weight are a partition of its logical rows."""
    spec = load_model("Qwen2.5-VL-32B")
    rows = [(b.part, r) for rank in range(tp) for b in order(spec, fused, tp, rank) for r in range(b.start, b.stop)]
    kv = spec.kv_heads * spec.head_dim
    want = {"gate_up": {"gate": spec.ffn, "up": spec.ffn}, "qkv": {"q": spec.hidden, "k": kv, "v": kv}}[fused]
    assert len(rows) == len(set(rows)) == sum(want.values())


# ---- optimality


def instance(seed: int) -> list[WeightClass]:
    """Random classes with random options: bytes in MiB, seconds in steps of a millisecond."""
    rng = random.Random(seed)
    views: tuple[View, ...] = ("alias", "slabs", "reindex", "rebuild")

    def option(view: View) -> Option:
        return Option(
            view, "", rng.randint(1, 3), rng.randrange(5) << 20, rng.randrange(5) / 1e3, rng.randrange(3) / 1e3
        )

    picked = [rng.sample(views, rng.randint(1, 4)) for _ in range(rng.randint(1, 5))]
    return [WeightClass(f"c{i}", (), 0, tuple(map(option, p))) for i, p in enumerate(picked)]


def placements(tp_t: int, tp_r: int) -> list[int]:
    """Placements of engines and ranks on GPUs that keep slabs with their shards: distances from e = g mod q."""
    q, slots = tp_t // tp_r, [(e, r) for e in range(tp_t // tp_r) for r in range(tp_r)]
    return [
        sum(abs(e - g % q) for g, (e, _) in enumerate(p))
        for p in itertools.permutations(slots)
        if all(r == g // q for g, (_, r) in enumerate(p))
    ]


def cheapest(classes: Sequence[WeightClass], rent_s: float | None) -> tuple[float, ...]:
    """Brute force over all combinations of options, objectives in order."""

    def values(combo: Sequence[Option]) -> tuple[float, ...]:
        nbytes, micro = sum(o.buffer_bytes for o in combo), sum(round(o.seconds * 1e6) for o in combo)
        slabs_ = sum(o.slabs for o in combo)
        if rent_s is None:
            return nbytes >> 10, micro, slabs_
        return micro + sum(round(o.buffer_bytes * rent_s * 1e6) for o in combo), slabs_

    return min(values(combo) for combo in itertools.product(*(c.options for c in classes)))


@pytest.mark.parametrize("rent_s", [None, 2e-9])
@pytest.mark.parametrize("degrees", [(4, 2), (4, 1), (3, 3), (6, 3)])
@pytest.mark.parametrize("seed", range(6))
def test_the_solver_is_optimal_on_small_instances(seed: int, degrees: tuple[int, int], rent_s: float | None) -> None:
    """Random classes and options, several degrees: CP-SAT equals the minimum over all combinations and placements."""
    model = constrain(Model(instance(seed), *degrees, rent_s), FAMILIES)
    objectives = model.objectives()
    solution = minimise(model.cp, "layout", objectives, seconds=10, seed=0)
    assert solution is not None
    found = tuple(round(r.value / o.scale) for r, o in zip(solution.results, objectives, strict=True))
    assert found == (*cheapest(model.classes, rent_s), min(placements(*degrees)))
    assert all(r.status == "optimal" and r.value == r.bound for r in solution.results)
