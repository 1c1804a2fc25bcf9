"""Where the pinned pool is what a GPU lacks: state that could wait in host memory, and for which there is no room.

actor FP32 master weights (15.3 GiB) could wait in host memory and stay in HBM in P1 prefix-actor: a GPU's share of its
node's pinned memory is 32.6 GiB (..); 38.2 GiB are planned for it, with these it would be 53.4 GiB
"""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.ir.job import Job
from rollplex.ir.module import Module
from rollplex.ir.plan import WindowSummary
from rollplex.ir.sizes import pretty
from rollplex.passes.residency import Residency
from rollplex.passes.state import Lifetimes, StateObject


def host_share(job: Job) -> int:
    """One GPU's share of the pinned pool of its node."""
    return job.host_pool_bytes // job.cluster.gpus_per_node


def crowded_out(module: Module, windows: list[WindowSummary]) -> Iterator[str]:
    """For the fullest window over HBM: what waits in it for a later use only because the pinned pool has no room."""
    job, share = module.job, host_share(module.job)
    fullest = max(windows, key=lambda w: w.hbm_bytes)
    waiting = _waiting(module, fullest.name)
    taken = max(w.host_bytes for w in windows)
    wanted = taken + sum(o.nbytes for o in waiting)
    if fullest.hbm_bytes <= job.capacity_bytes or not waiting or wanted <= share:
        return
    first, others = waiting[0], f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
    cluster = job.cluster
    yield (
        f"{first.title} ({pretty(first.nbytes)}){others} could wait in host memory and stay in HBM in {fullest.name}: "
        f"a GPU's share of its node's pinned memory is {pretty(share)} (cluster.pinned_share "
        f"{cluster.pinned_share:g} of {cluster.host_memory_gb:g} GB, over {cluster.gpus_per_node} GPUs); "
        f"{pretty(taken)} are planned for it, with these it would be {pretty(wanted)}"
    )


def _waiting(module: Module, window: str) -> list[StateObject]:
    """Objects in HBM in a window that does not use them and that may be at the host, largest first."""
    residency = module[Residency]
    found = [
        o
        for o in module[Lifetimes].objects
        if "host" in o.options and o.uses.get(window) != "hbm" and residency.place(o.name, window) == "hbm"
    ]
    return sorted(found, key=lambda o: (-o.nbytes, o.name))
