"""The vLLM backend's entry: the engine of a rollout rank.

What starts engine processes imports this module once for all of them: vLLM takes 15 s to import, a fork of it none.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rollplex.backends.collectives import Pair
from rollplex.backends.engine import Engine
from rollplex.backends.live import LiveBatch
from rollplex.backends.rollout.engine import RolloutEngine
from rollplex.backends.rollout.sampler import Served
from rollplex.backends.vllm import environment, versions
from rollplex.ir.errors import RunError
from rollplex.ir.job import Job
from rollplex.ir.placement import seat
from rollplex.ir.plan import Plan

environment.prepare()
if (_found := versions.installed()) and _found.supported:
    import_module("rollplex.backends.vllm.sampler")


def build(plan: Plan, job: Job, kind: str, rank: int, fds: Sequence[int], meeting: Path) -> Engine:
    """The engine of one process; `fds` are the ledgers of its device and of the host, ranks meet in `meeting`."""
    assert kind == "rollout", f"vllm is no engine of a {kind} rank"
    if problem := versions.lacking(versions.installed(), job.on_host):
        raise RunError(problem)
    from rollplex.backends.vllm.sampler import VllmSampler

    here, pair = seat(job, kind, rank), Pair(meeting, rank, sends=False)

    def make(served: Served) -> VllmSampler:
        return VllmSampler(job, here, served, meeting)

    return RolloutEngine(plan, job, here, pair, f"{kind} {rank}", fds, make, LiveBatch(meeting, rank))
