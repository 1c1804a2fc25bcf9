"""Bytes by pool: a GPU holds the objects of the processes that run on it, and of no others.

rollplex        gpus       32 GPUs    train + rollout        73.3 GiB in P1 decode
disaggregated   training   16 GPUs    train                  58.1 GiB in P2 train-actor
                rollout    16 GPUs    rollout                50.2 GiB in P1 decode
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollplex.ir.job import Job
from rollplex.ir.plan import PlannedObject, PoolSummary

Parts = Mapping[str, Mapping[str, int]]
"""By window, the bytes of objects that come or go piece by piece in it, at the moment at which most is there."""


def by_pool(job: Job, objects: Sequence[PlannedObject]) -> dict[str, list[PlannedObject]]:
    """Objects by the pool of the process that owns them."""
    return {pool: [o for o in objects if job.pool(o.process) == pool] for pool in job.pools}


def bytes_in(o: PlannedObject, window: str, parts: Parts) -> int:
    """Bytes of an object that is in HBM in a window, at its fullest moment."""
    return parts.get(window, {}).get(o.name, o.bytes)


def hbm_bytes(objects: Sequence[PlannedObject], window: str, parts: Parts) -> int:
    """Bytes of those that are in HBM in a window."""
    return sum(bytes_in(o, window, parts) for o in objects if o.residency[window] == "hbm")


def host_bytes(objects: Sequence[PlannedObject], window: str) -> int:
    """Bytes of those that the pinned pool holds in a window."""
    return sum(o.bytes for o in objects if o.host_backed or o.residency[window] == "host")


def pool_summaries(job: Job, objects: Sequence[PlannedObject], parts: Parts) -> tuple[PoolSummary, ...]:
    """Every pool with its own peaks."""
    return tuple(_pool(name, job.pools[name], mine, parts) for name, mine in by_pool(job, objects).items())


def _pool(name: str, gpus: int, objects: Sequence[PlannedObject], parts: Parts) -> PoolSummary:
    windows = tuple(objects[0].residency)
    peak = max(windows, key=lambda w: hbm_bytes(objects, w, parts))
    return PoolSummary(
        name=name,
        gpus=gpus,
        peak_hbm_bytes=hbm_bytes(objects, peak, parts),
        peak_window=peak,
        peak_host_bytes=max(host_bytes(objects, w) for w in windows),
    )
