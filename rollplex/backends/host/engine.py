"""The host backend's entry: the engine of a process kind."""

from __future__ import annotations

from collections.abc import Sequence

from rollplex.backends.engine import Engine
from rollplex.backends.host.roller import RolloutEngine
from rollplex.backends.host.trainer import TrainEngine
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan


def build(plan: Plan, job: Job, kind: str, rank: int, fds: Sequence[int]) -> Engine:
    """The engine of one process; `fds` are the ledgers of its device and of the host."""
    process = f"{kind} {rank}"
    return TrainEngine(plan, job, process, fds) if kind == "train" else RolloutEngine(plan, job, process, fds)
