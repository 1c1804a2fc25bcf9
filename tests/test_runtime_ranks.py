"""Several GPUs, each with a training and a rollout rank: the same step as on one, every GPU with its own bytes.

gpu 0   train 0   prompts 0, 1    rollout 0   prompts 0, 1      one snapshot a GPU, read by both of its ranks
gpu 1   train 1   prompts 2, 3    rollout 1   prompts 2, 3      gradients summed over dp, in place
"""

from __future__ import annotations

import os
import re
import signal
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from processes import children
from runtime_tiny import luck, tiny_plan

from benchmarks.h200.running import stacks
from rollplex.backends.collectives import groups_of
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.engine import EngineReport
from rollplex.ir.errors import EngineError
from rollplex.ir.job import Job
from rollplex.ir.placement import peers, rollout_seat, training_seat
from rollplex.ir.plan import Plan
from rollplex.ir.steps import describe
from rollplex.runtime.events import RunEvent, Started, StepEntered
from rollplex.runtime.gathering import agreed_digests, gathered, merged_metrics
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.run import run_plan

pytestmark = pytest.mark.processes

ROLES = {
    "actor": {
        "train": {"engine": "host"},
        "rollout": {"engine": "host", "kv_cache_gib": "1 MiB", "runtime_gib": "512 KiB"},
    },
    "reference": {"score": {"engine": "host"}},
}
TRAIN = ProcessId("train", 0)
NOTHING = sha256(b"").hexdigest()  # of engines that have sampled nothing


def plan_of(gpus: int, *, cut: bool = False) -> Plan:
    """`cut`: every data-parallel rank updates a share of the parameters (ZeRO-1)."""
    trainer = {"engine": "host", "distributed_optimizer": cut}
    return tiny_plan(
        cluster={"gpus_per_node": gpus},
        workload={"prompts": 4},
        model={"dtype": "float64"},
        roles={"actor": {**ROLES["actor"], "train": trainer}, "reference": {"score": {"engine": "host"}}},
        optimizer={"lr": 1e-3, "weight_decay": 0.1, "no_decay": ["*.bias", "*norm*"], "clip_norm": 0.5},
    )


def job(train: int, rollout: int, gpus: int) -> Job:
    data = tiny_plan().job
    actor = {
        **data["roles"]["actor"],
        "train": {"engine": "megatron", "tensor_parallel": train},
        "rollout": {"engine": "host", "tensor_parallel": rollout, "kv_cache_gib": 1},
    }
    cluster = {**data["cluster"], "gpus_per_node": gpus, "host_memory_gb": 100}
    changed = {"cluster": cluster, "roles": {"actor": actor}, "workload": {**data["workload"], "prompts": 8}}
    return Job.model_validate({**data, **changed})


def test_a_share_has_half_the_bytes_of_the_whole_state() -> None:
    """But for pages that are not full."""
    for name in ("actor.master", "actor.moments"):
        assert 0 <= 2 * plan_of(2, cut=True).object(name).bytes - plan_of(2).object(name).bytes <= 2 * 4096


@pytest.mark.parametrize("kind", ["barrier", "exchange"])
@pytest.mark.parametrize("victim", [ProcessId("train", 1), ProcessId("rollout", 1)])
def test_a_rank_that_is_killed_ends_the_run_and_leaves_nothing(victim: ProcessId, kind: str, tmp_path: Path) -> None:
    """The others wait for it at a barrier, or in a collective that fails: the error is about the one that died."""
    pids: dict[ProcessId, int] = {}

    def kill(event: RunEvent) -> None:
        if isinstance(event, Started):
            pids.update(event.pids)
        if isinstance(event, StepEntered) and event.process == TRAIN and event.step.kind == kind:
            os.kill(pids[victim], signal.SIGKILL)

    with pytest.raises(EngineError, match=f"{victim} .* was killed by SIGKILL"):
        run_plan(plan_of(2), hosts={"reward": luck}, out_dir=tmp_path / "run", progress=kill)
    assert children() == []


def test_where_ranks_wait_for_one_that_never_comes_is_in_their_logs(tmp_path: Path) -> None:
    """Rank 1 is stopped while it trains: rank 0 sums gradients in gloo, rollout ranks are at a barrier, all say so."""
    late = ProcessId("train", 1)
    pids: dict[ProcessId, int] = {}

    def stop(event: RunEvent) -> None:
        if isinstance(event, Started):
            pids.update(event.pids)
        if isinstance(event, StepEntered) and event.process == late and describe(event.step).startswith("run train"):
            os.kill(pids[late], signal.SIGSTOP)

    plan = plan_of(2)
    plan = plan.model_copy(update={"job": {**plan.job, "run": {**plan.job["run"], "step_timeout_s": 6.0}}})
    with pytest.raises(EngineError, match=r"train [01] \(pid \d+\) has been at it for 6 s in step `"):
        run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path / "run", progress=stop)
    found = dict(line.split(": ", 1) for line in stacks(tmp_path / "run" / "logs"))
    assert sorted(found) == ["rollout-0.log", "rollout-1.log", "train-0.log"]  # what is stopped writes nothing
    assert re.search(r"all_reduce distributed_c10d\.py:\d+ < .*all_reduce collectives\.py:\d+ < ", found["train-0.log"])
    assert all(re.search(r" link\.py:\d+ < ", found[f"rollout-{rank}.log"]) for rank in range(2))
    assert children() == []


# ---- who stands where


def test_the_ranks_of_a_gpu_share_a_shard() -> None:
    """TP 4 trains, TP 2 rolls out, two copies: engine e of a copy stands on GPUs e, e + 2 (paper section 3.3)."""
    found = job(4, 2, 8)
    engines: dict[int, list[int]] = {}
    for gpu in range(8):
        train, rollout = training_seat(found, gpu), rollout_seat(found, gpu)
        assert (train.copy, train.tp) == divmod(gpu, 4)
        assert rollout.tp == train.tp // 2
        assert set(rollout.prompts) <= set(train.prompts)
        engines.setdefault(rollout.copy, []).append(gpu)
    assert engines == {0: [0, 2], 1: [1, 3], 2: [4, 6], 3: [5, 7]}
    assert groups_of(found, "train", 8) == {
        "tp": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }
    assert [peers(found, rank) for rank in range(4, 8)] == [(5,), (4,), (7,), (6,)]
    assert groups_of(found, "rollout", 8)["tp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize(("train", "rollout", "gpus"), [(1, 1, 4), (2, 1, 2), (2, 2, 4), (4, 2, 4), (4, 1, 8)])
def test_every_prompt_is_sampled_once_and_trained_once(train: int, rollout: int, gpus: int) -> None:
    found = job(train, rollout, gpus)
    for seat_of in (training_seat, rollout_seat):
        speaking = [s for s in (seat_of(found, gpu) for gpu in range(gpus)) if s.speaks]
        assert sorted(p for s in speaking for p in s.prompts) == list(range(8))


# ---- parts and wholes


def test_metrics_are_averaged_and_sums_are_added() -> None:
    reports = [EngineReport({"norm": 2.0}, {"loss": 0.25}), EngineReport({"norm": 4.0}, {"loss": 0.5}), EngineReport()]
    assert merged_metrics(reports) == {"norm": 3.0, "loss": 0.75}


def test_copies_that_differ_are_refused() -> None:
    answers = {ProcessId("train", r): {"actor.master": str(r // 2)} for r in range(4)}
    with pytest.raises(EngineError, match=r"train 2 and train 0 hold copies of actor\.master that differ"):
        agreed_digests(job(2, 2, 4), answers)
    same = {ProcessId("train", r): {"actor.master": str(r % 2)} for r in range(4)}
    assert agreed_digests(job(2, 2, 4), same) == {"actor.master": "0", "actor.master.tp1": "1", "rollouts": NOTHING}


def test_ranks_of_one_engine_that_sampled_other_tokens_are_refused() -> None:
    def rollout(token: int) -> Rollout:
        return Rollout(
            torch.full((4, 1, 2), token),
            torch.full((4, 1), 2),
            torch.zeros(4, 1, 2),
            torch.arange(4),
            torch.ones(4, 1, 2),
        )

    parts = {ProcessId("rollout", r): {"rollout": rollout(5 + r // 2)} for r in range(4)}
    whole = gathered(job(2, 2, 4), parts)["rollout"]
    assert whole.tokens[:, 0, 0].tolist() == [5, 5, 5, 5, 6, 6, 6, 6]
    parts[ProcessId("rollout", 1)] = {"rollout": rollout(9)}
    with pytest.raises(EngineError, match="rollout 1 and rollout 0 are ranks of one engine and sampled other tokens"):
        gathered(job(2, 2, 4), parts)
