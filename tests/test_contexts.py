"""CUDA contexts and NCCL buffers: what each process takes before it allocates, from measured figures or the job's."""

from __future__ import annotations

import pytest

from rollplex.ir.hardware import communication_mib
from rollplex.ir.job import Job, load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.serving import context_bytes
from rollplex.passes.pipeline import compile_plan
from rollplex.passes.work import communicators, process_bytes

X8, X32 = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", "examples/jobs/qwen2_5_vl_32b_h800x32.yaml"
MIB = 2**20

# communicators: MiB of a rank beyond its context, kernels and the collectives' tensors (results/context_h200.md)
MEASURED = {0: 0, 1: 1587 - 727 - 20, 2: 2073 - 727 - 20, 3: 2557 - 727 - 20, 4: 3043 - 727 - 20}


@pytest.mark.parametrize(("count", "mib"), MEASURED.items())
def test_nccl_takes_what_was_measured(count: int, mib: int) -> None:
    """840 MiB with the first communicator, 485 with each other one, within 2 MiB of the run."""
    assert communication_mib(count) == pytest.approx(mib, abs=2)


def test_a_rank_is_in_the_groups_of_its_degrees() -> None:
    """One node: TP8. Four: DP4 too. vLLM has its TP4. Slabs of a rollout shard need none in a node."""
    one, four = load_job(X8), load_job(X32)
    assert communicators(one, "train", ()) == ("tp8",)
    assert communicators(four, "train", ()) == ("tp8", "dp4")
    assert communicators(one, "rollout", ()) == ("tp4", "logits4")
    plan = compile_plan(load_algorithm("examples/grpo.py"), four)
    assert plan.summary.layout.q == 2
    assert "NCCL over tp8, dp4" in plan.object("train.context").why


@pytest.mark.parametrize(
    ("model", "tp", "mib"),
    [
        ("Qwen2.5-VL-32B", 1, 774),
        ("Qwen2.5-VL-32B", 2, 774 + 840 + 485 + 24),
        ("Qwen3-VL-30B-A3B", 2, 774 + 840 + 970 + 24),
    ],
)
def test_vllm_has_groups_of_its_own(model: str, tp: int, mib: int) -> None:
    """Its all-reduces' and torch's, which gathers logits, over the same ranks; with experts a third."""
    overrides = [
        f"model.name={model}",
        f"roles.actor.rollout.tensor_parallel={tp}",
        "roles.actor.train.tensor_parallel=4",
    ]
    job = load_job(X8, [*overrides, "roles.reference.score.tensor_parallel=4"])
    plan = compile_plan(load_algorithm("examples/grpo.py"), job)
    assert 0 <= plan.object("rollout.context").bytes - mib * MIB < 2 * MIB
    stated = load_job(X8, [*overrides, "roles.reference.score.tensor_parallel=4", "cluster.nccl_gib=1"])
    assert context_bytes(stated) == (774 + 1024 * (tp > 1)) * MIB


def test_groups_of_the_same_ranks_are_one() -> None:
    """Rollout TP 1: the eight whose slabs make up a shard are those of TP 8; two contexts of pages are as many."""
    one = load_job(X8, ["roles.actor.rollout.tensor_parallel=1"])
    assert one.q == one.train_tp == 8
    assert communicators(one, "train", (1, 8)) == ("tp8",)
    plan = compile_plan(load_algorithm("examples/grpo.py"), one)
    assert plan.object("train.context").bytes == (774 + 840) * MIB


def test_nccl_carries_what_comes_from_other_nodes() -> None:
    """30B-A3B at TP4 and EP4 under rollout TP2: dense weights of 2 neighbours, experts of 2 x 4 ranks on two nodes.

    Two stages double both, and stand on different nodes.
    """
    moe = ["model.name=Qwen3-VL-30B-A3B", "roles.actor.train.tensor_parallel=4", "roles.actor.train.expert_parallel=4"]
    moe += ["roles.reference.score.tensor_parallel=4", "roles.actor.rollout.tensor_parallel=2"]
    found = [f"roles.actor.train.pipeline_parallel={pp}" for pp in (1, 2)]
    contexts = [compile_plan(load_algorithm("examples/grpo.py"), load_job(X32, [*moe, o])) for o in found]
    whys = [plan.object("train.context").why for plan in contexts]
    assert "NCCL over tp4, ep4, dp8, q8" in whys[0]
    assert "NCCL over tp4, pp2, ep4, q4, q16" in whys[1]  # of four replicas, over which experts are cut too


def sized(groups: tuple[str, ...], *overrides: str) -> float:
    job: Job = load_job(X8, overrides)
    return process_bytes(job, groups) / MIB


def test_the_job_may_state_its_own_figures() -> None:
    """A stated nccl_gib is for the process, whatever its groups, and nothing where it has none."""
    assert sized(("tp8",)) == 774 + 840
    assert sized(("tp8", "q2"), "cluster.context_gib=0.5 GiB", "cluster.nccl_gib=1") == 512 + 1024
    assert sized((), "cluster.nccl_gib=1") == 774
    assert sized(("tp8",), "cluster.context_gib=0", "cluster.nccl_gib=0") == 0


def test_a_cpu_process_has_no_context() -> None:
    """The host backend's plans have no such object: the arena's log would have to show it."""
    job = load_job("examples/jobs/shapes_host.yaml")
    assert process_bytes(job, communicators(job, "train", ())) == 0
