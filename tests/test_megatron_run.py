"""Whole runs with Megatron-Core as trainer, on real processes: the same steps as the host engine takes.

TP 1    train 0                       rollout 0                 QKV rebuilt (case 3), all else one copy
TP 2    train 0   prompts 0, 1        rollout 0   prompt 0      a GPU's snapshot is the whole shard of its rollout rank:
        train 1   prompts 0, 1        rollout 1   prompt 1      half of each tensor is trained there, half is received
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from runtime_tiny import CONFIG, luck, tiny_plan
from safetensors.torch import load_file

from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange, Rebuild
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.run import RunResult, run_plan

pytestmark = pytest.mark.processes

ROLLOUT = {"engine": "host", "kv_cache_gib": "1 MiB", "runtime_gib": "512 KiB"}
HOST: dict[str, Any] = {"engine": "host"}


def megatron(tp: int) -> dict[str, Any]:
    return {"engine": "megatron", "tensor_parallel": tp, "sequence_parallel": False}


def plan_of(
    train: dict[str, Any], schedule: str = "rollplex", order: str = "stock", ablate: tuple[str, ...] = ()
) -> Plan:
    return tiny_plan(
        ablate=list(ablate),
        layout={"order": order},
        model={"dtype": "float64"},
        cluster={"capacity_gib": "32 MiB", "gpus_per_node": train.get("tensor_parallel", 1)},
        roles={"actor": {"train": train, "rollout": ROLLOUT}, "reference": {"score": train}},
        optimizer={"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5, "no_decay": ["*.bias", "*norm*", "*lm_head*"]},
        run={"silent_s": 60},
        schedule=schedule,
    )


@cache
def result(tp: int, schedule: str = "rollplex", order: str = "stock") -> RunResult:
    """Two steps; TP 0 is the host engine."""
    plan = plan_of(megatron(tp) if tp else HOST, schedule, order)
    return run_plan(plan, hosts={"reward": luck}, out_dir=Path(mkdtemp()) / "run")


@pytest.mark.parametrize(("tp", "order"), [(1, "stock"), (2, "stock"), (2, "reindex")])
def test_the_steps_are_those_of_the_host_engine(tp: int, order: str) -> None:
    """In float64, two updates with clipping and weight decay: the same samples, losses, norms and weights."""
    host, found = result(0), result(tp, order=order)
    for a, b in zip(host.report.metrics, found.report.metrics, strict=True):
        for name in ("reward", "loss", "grad_norm", "response_tokens"):
            assert a[name] == pytest.approx(b[name], abs=1e-10), name
    wanted, weights = (load_file(r.final / "model.safetensors") for r in (host, found))
    assert wanted.keys() == weights.keys()
    assert max((wanted[name] - weights[name]).abs().max() for name in wanted) <= 1e-10


def test_serial_and_rollplex_are_identical_to_the_bit() -> None:
    """Overlap changes when a prefix runs, not what it computes."""
    assert result(1, "serial").digests == result(1).digests


def test_groups_trained_on_as_they_complete_give_the_same_bits() -> None:
    """TP 2 to 1: each of two engines has one of a training rank's two groups, and sends nothing of the other's."""
    assert result(2, "streamed").digests == result(2).digests


def test_with_states_resident_kv_kept_and_one_whole_chunk_it_trains_to_the_same_bits(tmp_path: Path) -> None:
    """Three ablations of Figure 8 at once; the fourth, a second copy of the weights, is the host trainer's alone."""
    plan = plan_of(megatron(1), ablate=("state_offload", "rollout_release", "chunked_optimizer"))
    found = run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path / "run")
    assert found.digests == result(1).digests
    refused = plan_of(megatron(1), ablate=("weight_sharing",)).not_executable
    assert refused == ("a second copy of the weights: only the host trainer's lie as the rollout engine reads them",)


@pytest.mark.parametrize("tp", [1, 2])
def test_every_gpu_has_the_bytes_of_the_plan_and_one_copy_of_the_actor(tp: int) -> None:
    """Both engines of a GPU hold the same pages, the rebuilt QKV too; no window has other objects than planned."""
    found = result(tp)
    assert [row for row in found.report.objects if not row.as_planned] == []
    inodes = {process: facts["inodes"] for process, facts in found.facts.items()}
    for gpu in range(tp):
        assert inodes[ProcessId("train", gpu)] == inodes[ProcessId("rollout", gpu)]
        assert set(inodes[ProcessId("train", gpu)]) == {"actor.snapshot", "actor.vision", "actor.case3"}


def test_after_the_exchange_every_gpu_has_the_whole_shard() -> None:
    """Each rank trained half of every tensor; both shards are the same bits, the halves of the state are not."""
    digests = result(2).digests
    assert digests["actor.snapshot"] == digests["actor.snapshot.tp1"]
    assert digests["actor.vision"] == digests["actor.vision.tp1"]
    assert digests["actor.master"] != digests["actor.master.tp1"]


CUTS = [(2, 2, 2, "stock", 2), (2, 1, 4, "stock", 2), (4, 2, 4, "stock", 4), (4, 1, 4, "reindex", 4)]
"""TP of training and rollout, GPUs, row order, KV heads: the megatron backend has one for each rank at least."""


@cache
def cut_result(train: int, rollout: int, gpus: int, order: str, kv_heads: int) -> RunResult:
    """Two steps of four prompts; TP 0 is the host engine."""
    trainer, roller = (megatron(train), {**ROLLOUT, "tensor_parallel": rollout}) if train else (HOST, ROLLOUT)
    plan = tiny_plan(
        model={"dtype": "float64", "config": {**CONFIG, "num_key_value_heads": kv_heads}},
        cluster={"capacity_gib": "32 MiB", "gpus_per_node": gpus},
        roles={"actor": {"train": trainer, "rollout": roller}, "reference": {"score": trainer}},
        workload={"prompts": 4},
        optimizer={"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5},
        run={"silent_s": 60},
        layout={"order": order},
    )
    return run_plan(plan, hosts={"reward": luck}, out_dir=Path(mkdtemp()) / "run")


@pytest.mark.parametrize(("train", "rollout", "gpus", "order", "kv_heads"), CUTS)
def test_every_ratio_of_cuts_takes_the_steps_of_one_gpu(
    train: int, rollout: int, gpus: int, order: str, kv_heads: int
) -> None:
    """TP 2 to 2, 2 to 1 with two copies, 4 to 2, 4 to 1: samples, losses, norms and weights of the host on one GPU."""
    one, found = cut_result(0, 1, 1, "stock", kv_heads), cut_result(train, rollout, gpus, order, kv_heads)
    for a, b in zip(one.report.metrics, found.report.metrics, strict=True):
        for name in ("reward", "loss", "grad_norm", "response_tokens"):
            assert a[name] == pytest.approx(b[name], abs=1e-10), name
    wanted, weights = (load_file(r.final / "model.safetensors") for r in (one, found))
    assert max((wanted[name] - weights[name]).abs().max() for name in wanted) <= 1e-10
    assert [row for row in found.report.objects if not row.as_planned] == []
    inodes = {process: facts["inodes"] for process, facts in found.facts.items()}
    for gpu in range(gpus):
        assert inodes[ProcessId("train", gpu)] == inodes[ProcessId("rollout", gpu)]


def test_the_plans_are_what_they_are_said_to_be() -> None:
    """Cases 1, 2 and 3 are there, and what the layout needs is done."""
    one, two = plan_of(megatron(1)), plan_of(megatron(2))
    views = [{c.name: c.view for c in plan.summary.layout.classes} for plan in (one, two)]
    assert (views[0]["qkv"], views[0]["o"], views[0]["gate_up"]) == ("rebuild", "alias", "alias")
    assert (views[1]["qkv"], views[1]["o"], views[1]["gate_up"]) == ("rebuild", "transpose", "slabs")
    assert [type(s) for s in one.programs["train"] if isinstance(s, Exchange | Rebuild)] == [Rebuild]
    assert [type(s) for s in two.programs["train"] if isinstance(s, Exchange | Rebuild)] == [Exchange, Rebuild]
    joined = plan_of(megatron(2), order="reindex").summary.layout
    assert {"qkv": "reindex", "gate_up": "interleave"}.items() <= {c.name: c.view for c in joined.classes}.items()
    assert joined.case3_buffer_bytes == 0
    assert not one.not_executable
    assert not two.not_executable
