"""The host backend's entry: the engine of a process kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollplex.backends.collectives import Groups, Pair
from rollplex.backends.engine import Engine
from rollplex.backends.host.replica import Replica
from rollplex.backends.host.sampler import HostSampler
from rollplex.backends.live import LiveBatch
from rollplex.backends.memory.planned import PlannedObjects
from rollplex.backends.rollout.engine import RolloutEngine
from rollplex.backends.training.trainer import TrainEngine
from rollplex.ir.job import Job
from rollplex.ir.placement import seat
from rollplex.ir.plan import Plan


def build(plan: Plan, job: Job, kind: str, rank: int, fds: Sequence[int], meeting: Path) -> Engine:
    """The engine of one process; `fds` are the ledgers of its device and of the host, ranks meet in `meeting`."""
    process, here = f"{kind} {rank}", seat(job, kind, rank)
    groups = Groups.join(job, kind, rank, plan.processes[kind].ranks, meeting)
    pair = Pair(meeting, rank, sends=kind == "train")
    live = LiveBatch(meeting, rank)
    if kind == "rollout":
        return RolloutEngine(plan, job, here, pair, process, fds, lambda served: HostSampler(job, served, groups), live)

    def make(role: str, objects: PlannedObjects) -> Replica:
        return Replica(job, role, objects, trained=role in job.trained)

    return TrainEngine(plan, job, here, groups, pair, process, fds, make, (live,))
