"""Two pools: rollout on its own GPUs, training on the others, one after the other (paper section 4.2, baseline 2).

rollout    16 GPUs   generate ............................................ receive theta_k+1
training   16 GPUs   .................  score, train  |  update  |  send theta_k+1 |
"""

from __future__ import annotations

from functools import cache

import pytest

from rollplex.ir.check.capacity import Cuts, loads, peaks
from rollplex.ir.check.facts import Facts
from rollplex.ir.check.order import execute
from rollplex.ir.check.residency import replay
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange, Signal
from rollplex.passes.pipeline import compile_plan

GRPO = load_algorithm("examples/grpo.py")
NODE, CLUSTER = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", "examples/jobs/qwen2_5_vl_32b_h800x32.yaml"
POOLS = ("schedule=disaggregated", "cluster.rollout_gpus=16")
KEPT = (*POOLS, "roles.actor.prefix_saved=host")  # else prefixes run with their groups, which takes less
TP4 = ("roles.actor.train.tensor_parallel=4", "roles.reference.score.tensor_parallel=4")
GIB = 2**30


@cache
def compiled(job: str, *overrides: str) -> Plan:
    return compile_plan(GRPO, load_job(job, overrides))


def test_half_the_gpus_roll_out_and_half_train() -> None:
    """32 prompts on 4 engines of TP4 and 2 ranks of TP8; all 32 GPUs together have 8 and 4."""
    plan = compiled(CLUSTER, *KEPT)
    assert plan.feasible
    assert {name: (k.pool, k.ranks, k.data_parallel) for name, k in plan.processes.items()} == {
        "controller": ("", 1, 1),
        "train": ("training", 16, 2),
        "rollout": ("rollout", 16, 4),
    }
    assert [(p.name, p.gpus) for p in plan.summary.pools] == [("training", 16), ("rollout", 16)]
    assert plan.object("actor.boundary").slots == 16
    assert any("schedule disaggregated" in feature for feature in plan.not_executable)


def test_a_pool_holds_its_own_objects_only() -> None:
    """Rollout: weights 15.3 + tower 1.3 + KV 29 + runtime 3 + context; training: no KV, and no case-3 buffer."""
    plan = compiled(CLUSTER, *POOLS)
    sizes = {o.name: o.bytes for o in plan.summary.objects if plan.pool_of(o.name) == "rollout"}
    assert set(sizes) == {f"rollout.{name}" for name in ("context", "weights", "vision", "kv", "runtime")}
    training, rollout = plan.summary.pools
    assert rollout.peak_hbm_bytes == sum(sizes.values())
    assert plan.summary.peak_hbm_bytes == max(training.peak_hbm_bytes, rollout.peak_hbm_bytes)
    assert plan.summary.peak_hbm_bytes < max(sum(w.by_object.values()) for w in plan.summary.windows)
    assert not [o for o in plan.summary.objects if o.readers or o.name.endswith("case3")]


@pytest.mark.parametrize("job", [(CLUSTER, *POOLS), (NODE, "schedule=rollplex"), (NODE, "schedule=serial")])
def test_replayed_capacity_is_what_the_windows_say(job: tuple[str, ...]) -> None:
    """The most that the processes of a pool can hold together, in any order of their steps, window by window."""
    plan = compiled(*job)
    facts = Facts(plan)
    cuts, held = Cuts(facts, execute(facts)[0]), replay(facts)
    for pool, processes in facts.pools.items():
        pages = [span for process in processes for span in held[process].spans.pages]
        replayed = {window: peak.nbytes for window, peak in peaks(cuts, loads(facts, pages)).items()}
        for w in plan.summary.windows:
            assert replayed[w.name] == sum(n for o, n in w.by_object.items() if plan.pool_of(o) == pool), w.name


def test_new_weights_cross_once_a_step_and_both_sides_enter() -> None:
    """train: exchange actor.snapshot || rollout: exchange rollout.weights; a trained tower is sent too."""
    for overrides, sent in ((POOLS, 1), ((*POOLS, "roles.actor.freeze=[]"), 2)):
        plan = compiled(CLUSTER, *overrides)
        meet = [
            [s for s in plan.programs[p] if isinstance(s, Exchange) and s.group == "refresh"]
            for p in ("train", "rollout")
        ]
        assert [len(side) for side in meet] == [sent, sent]
        assert (
            [s.nbytes for s in meet[0]] == [s.nbytes for s in meet[1]] == [plan.object(s.object).bytes for s in meet[1]]
        )
        assert plan.summary.layout.exchange_bytes_per_gpu == pytest.approx(sum(s.nbytes for s in meet[0]), rel=1e-3)


def test_nothing_is_released_for_the_other_engine() -> None:
    """The rollout pool keeps its KV cache mapped: no event tells the trainer of freed pages."""
    plan = compiled(CLUSTER, *POOLS)
    assert set(plan.object("rollout.kv").residency.values()) == {"hbm"}
    assert not [s for s in plan.programs["rollout"] if isinstance(s, Signal) and not s.carries]


@pytest.mark.parametrize("rollout", [8, 4, 2])
def test_q_need_not_be_a_whole_number(rollout: int) -> None:
    """Training TP4 and rollout TP8, 4, 2: no shard is shared, so none has to be made of others."""
    over = (*TP4, f"roles.actor.rollout.tensor_parallel={rollout}")
    assert compiled(CLUSTER, *POOLS, *over).processes["rollout"].tensor_parallel == rollout


def test_pools_of_one_node_use_its_links() -> None:
    """4 + 4 GPUs: weights over NVLink in less than a second; two nodes of 8: over the network, in many."""
    near = compiled(NODE, "schedule=disaggregated", "cluster.rollout_gpus=4", *TP4, "workload.prompts=4")
    far = compiled(CLUSTER, *POOLS)
    publish = [next(w.seconds for w in p.summary.windows if w.name == "P3 publish") for p in (near, far)]
    assert publish[0] < 1
    assert publish[1] > 10


def test_each_pool_waits_for_the_other() -> None:
    """The step is the sum of its windows, and longer than with all GPUs for every phase."""
    t = compiled(CLUSTER, *KEPT).summary.times
    serial = compiled(CLUSTER, "schedule=serial").summary.times
    assert t.step_s == pytest.approx(t.decode_s + t.prefix_s + t.post_s + t.exposed_transfer_s)
    assert t.prefix_s == pytest.approx(2 * serial.prefix_s)
    assert serial.decode_s < t.decode_s < 2 * serial.decode_s
    assert t.speedup_vs_serial < 1


def test_pools_without_effect_are_told() -> None:
    assert "cluster.rollout_gpus has no effect" in " ".join(load_job(CLUSTER, ["cluster.rollout_gpus=16"]).notes())
