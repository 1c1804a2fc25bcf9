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
from rollplex.passes.layout import Layout, LayoutPass, Option, WeightClass, build, contiguous, one_slab_a_part
from rollplex.passes.solver import minimise

JOB = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"


def solve(job: Job) -> Layout:
    return LayoutPass().run(Module(None, job, None))[Layout]  # type: ignore[arg-type]


def test_coverage_of_the_32b_model_is_the_papers() -> None:
    """60.0 / 32.8 / 7.2 % in the paper; 19.677 / 10.737 / 2.349 B parameters by arithmetic; buffer 1.09 GiB."""
    summary = solve(load_job(JOB)).summary
    assert {k: round(c.params / 1e9, 3) for k, c in summary.cases.items()} == {"1": 19.677, "2": 10.737, "3": 2.349}
    total = sum(c.params for c in summary.cases.values())
    assert total == load_model("Qwen2.5-VL-32B").language_parameters
    assert [round(100 * summary.cases[k].params / total, 2) for k in "123"] == [60.06, 32.77, 7.17]
    assert round(summary.case3_buffer_bytes / 2**30, 2) == 1.09


def test_rank_placement_lets_every_gpu_own_a_slab_of_its_rollout_rank() -> None:
    """TP8 -> TP4: engine 0 on GPUs 0 2 4 6, engine 1 on 1 3 5 7 (GPU of training rank g hosts rollout rank g // 2)."""
    placement = solve(load_job(JOB)).summary.placement
    assert placement == {"engine 0": (0, 2, 4, 6), "engine 1": (1, 3, 5, 7)}


def test_an_update_exchanges_the_other_half_of_every_sharded_tensor() -> None:
    """q = 2: a GPU owns half of the rollout shard's sharded tensors and receives the other half."""
    job = load_job(JOB)
    spec = job.spec
    sharded = sum(spec.shard_numel(t, 4) for t in spec.tensors() if t.axis is not None)
    assert solve(job).summary.exchange_bytes_per_gpu == sharded * 2 // 2


def test_equal_degrees_share_everything_but_the_reordered_qkv() -> None:
    """TP4 on both sides: only the order of QKV rows differs, and with one KV group a rank not even that."""
    same = load_job(JOB, ["roles.actor.rollout.tensor_parallel=8", "roles.actor.rollout.kv_cache_gib=29"])
    assert solve(same).summary.cases["3"].params == 0
    assert solve(same).summary.exchange_bytes_per_gpu == 0
    both4 = load_job(JOB, ["roles.actor.train.tensor_parallel=4", "roles.reference.score.tensor_parallel=4"])
    assert solve(both4).summary.cases["3"].params == 2349268992
    assert solve(both4).summary.cases["2"].params == 0


def blocks(text: str) -> list[Block]:
    """`q0:2 k0:1` -> blocks."""
    parts = (word.partition(":") for word in text.split())
    return [Block(head[0], int(head[1:]), int(stop)) for head, _, stop in parts]


@pytest.mark.parametrize(
    ("inner", "outer", "nested", "slabs"),
    [
        ("g0:2", "g0:4", True, True),
        ("g2:4", "g0:4", True, True),
        ("g0:2 u0:2", "g0:4 u0:4", False, True),
        ("g2:4 u0:4", "g0:4 u0:4", True, True),
        ("g0:4 u0:4", "g0:4 u0:4", True, True),
        ("q0:2 k0:1 v0:1", "q0:4 k0:2 v0:2", False, True),
        ("q0:2 k0:1 v0:1 q2:4 k1:2 v1:2", "q0:4 k0:2 v0:2", False, False),
        ("g0:5", "g0:4", False, False),
    ],
)
def test_nesting_of_row_orders(inner: str, outer: str, nested: bool, slabs: bool) -> None:
    """A training shard aliases when it is one run of the rollout shard's rows; a part may be one run by itself."""
    assert contiguous(blocks(inner), blocks(outer)) is nested
    assert one_slab_a_part(blocks(inner), blocks(outer)) is slabs


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


def cheapest(classes: Sequence[WeightClass]) -> tuple[int, int]:
    """Brute force over all combinations of options: (buffer, work) in KiB, in this order."""
    combos = itertools.product(*(c.options for c in classes))
    return min((sum(o.buffer_bytes >> 10 for o in c), sum(o.work_bytes >> 10 for o in c)) for c in combos)


@pytest.mark.parametrize("seed", range(20))
def test_the_solver_is_optimal_on_small_instances(seed: int) -> None:
    """Random classes with random options: the CP-SAT optimum equals the minimum over all combinations."""
    rng = random.Random(seed)

    def option(j: int) -> Option:
        return Option(f"o{j}", "", rng.randrange(5) << 20, rng.randrange(5) << 20)

    options = [tuple(option(j) for j in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 5))]
    classes = [WeightClass(f"c{i}", (), 0, True, o) for i, o in enumerate(options)]
    model, _, objectives = build(classes, 4, 2)
    solution = minimise(model, "layout", objectives, seconds=10, seed=0)
    assert solution is not None
    assert tuple(round(r.value / 1024) for r in solution.results[:2]) == cheapest(classes)
    assert all(r.status == "optimal" and r.value == r.bound for r in solution.results)
