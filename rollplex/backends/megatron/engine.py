"""The megatron backend's entry: the engine of a training rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollplex.backends.collectives import Groups, Pair
from rollplex.backends.engine import Engine
from rollplex.backends.live import LiveBatch
from rollplex.backends.megatron.replica import Replica
from rollplex.backends.memory.planned import PlannedObjects
from rollplex.backends.training.trainer import TrainEngine
from rollplex.ir.job import Job
from rollplex.ir.placement import seat
from rollplex.ir.plan import Plan


def build(plan: Plan, job: Job, kind: str, rank: int, fds: Sequence[int], meeting: Path) -> Engine:
    """The engine of one process; ranks meet in `meeting`.

    `fds` are the ledgers of its device and of the host, then of the devices of its peers.
    """
    assert kind == "train", f"megatron is no engine of a {kind} rank"
    here = seat(job, kind, rank)
    groups = Groups.join(job, kind, rank, plan.processes[kind].ranks, meeting)

    def make(role: str, objects: PlannedObjects) -> Replica:
        return Replica(plan, job, here, groups, role, objects)

    pair = Pair(meeting, rank, sends=True)
    live = [LiveBatch(meeting, rank - here.tp + other) for other in range(job.train_tp)]
    return TrainEngine(plan, job, here, groups, pair, f"{kind} {rank}", fds, make, live)
