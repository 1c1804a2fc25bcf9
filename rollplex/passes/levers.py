"""What can be changed in a job, one decision at a time: from the mildest change to the most drastic.

for lever in levers(job): print(lever)

    workload.prompts=30 .. workload.prompts=2
    roles.actor.train.pipeline_parallel=2 .. roles.actor.train.pipeline_parallel=4
    cluster.pinned_share=0.86 .. cluster.pinned_share=0.95
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from rollplex.ir.job import Job
from rollplex.ir.job_schema import Ablation, LayoutOrder
from rollplex.ir.releasing import not_releasable
from rollplex.passes.lever import Lever, Overrides, one_key, size_text, spread
from rollplex.passes.levers_engines import trainers
from rollplex.passes.levers_rollout import budget_for, rollout

MOST_PINNED = 95
"""Hundredths of a node's memory: the rest is the system's, the controller's and the batch's."""


def levers(job: Job) -> tuple[Lever, ...]:
    """Every decision that can make a job smaller or its machines larger; what is legal is the job's to say."""
    engines = (*trainers(job), *rollout(job), *_layout(job))
    found = (*_mechanisms(job), *engines, *_workload(job), *_update(job), *_machines(job))
    return tuple(lever for lever in found if lever.steps)


# ---- what the schedule does


def _mechanisms(job: Job) -> Iterator[Lever]:
    for other in ("rollplex", "serial") if job.schedule != "serial" else ():
        yield one_key("schedule", (other,) if other != job.schedule else ())
    for mechanism in (a for a in get_args(Ablation) if a in job.ablate):
        rest = [a for a in job.ablate if a != mechanism]
        yield one_key("ablate", (f"[{','.join(rest)}]",))
    if len(job.ablate) > 1:
        yield one_key("ablate", ("[]",))


def _layout(job: Job) -> Iterator[Lever]:
    """Row orders in which fewer weights need a buffer of the rollout engine's own."""
    tighter: dict[LayoutOrder, tuple[LayoutOrder, ...]] = {"stock": ("auto", "reindex"), "auto": ("reindex",)}
    for order in tighter.get(job.layout.order, ()) if job.shares_weights else ():
        yield one_key("layout.order", (order,))


# ---- the work of a step


def _workload(job: Job) -> Iterator[Lever]:
    work = job.workload
    step = math.lcm(job.engines, *(job.data_parallel(name) for name in job.roles))
    smaller = {
        "prompts": range((work.prompts - 1) // step * step, 0, -step),
        "prompt_tokens": _shorter(work.prompt_tokens),
        "response_tokens": _shorter(work.response_tokens),
    }
    for key, values in smaller.items():
        yield from _with_kv_budget(job, "workload", key, values)
    if job.spec.vision and work.frames:
        yield one_key("workload.max_pixels", _fewer_pixels(job))


def _with_kv_budget(
    job: Job, section: Literal["workload", "cluster"], key: str, values: Sequence[int]
) -> Iterator[Lever]:
    """A key that leaves an engine less to do; then the same values with the KV budget lowered to what that takes."""
    yield one_key(f"{section}.{key}", values)
    steps: list[Overrides] = []
    for value in spread(values):
        changed = getattr(job, section).model_copy(update={key: value})
        if less := budget_for(job.model_copy(update={section: changed})):
            steps.append((f"{section}.{key}={value}", less))
    yield Lever(tuple(steps))


def _shorter(tokens: int) -> range:
    """Budgets below the present one in round steps, down to an eighth."""
    step = 2 ** max(0, int(math.log2(tokens)) - 5)
    return range((tokens - 1) // step * step, max(2, tokens // 8) - 1, -step)


def _fewer_pixels(job: Job) -> list[int]:
    """Bounds of a frame in whole visual tokens, below the stated one or what a whole prompt of frames would be."""
    vision, work = job.spec.vision, job.workload
    assert vision is not None
    token = (vision.patch * vision.merge) ** 2
    whole = work.prompt_tokens // math.ceil(work.frames / vision.temporal_patch)
    now = min(whole, work.max_pixels // token) if work.max_pixels else whole
    return [n * token for n in range(now - 1, now // 8, -max(1, now // 16)) if n > 0]


# ---- the update


def _update(job: Job) -> Iterator[Lever]:
    optimizer = job.optimizer
    if optimizer.chunks != "auto":
        yield one_key("optimizer.chunks", ("auto",))
    elif job.ablate and "chunked_optimizer" not in job.ablate:  # it holds the chunks of the full schedule
        yield one_key("optimizer.chunks", tuple(str(2**k) for k in range(3, 8)))
    if optimizer.snapshot == "keep" and not not_releasable(job):
        yield one_key("optimizer.snapshot", ("release",))
    yield one_key("optimizer.in_flight", tuple(str(n) for n in range(optimizer.in_flight - 1, 0, -1)))


# ---- the machines


def _machines(job: Job) -> Iterator[Lever]:
    c = job.cluster
    shares = range(math.floor(c.pinned_share * 100) + 1, MOST_PINNED + 1)
    yield one_key("cluster.pinned_share", [f"{n / 100:g}" for n in shares])
    fewer = range(math.ceil(c.pinned_share * 20) - 1, 3, -1)  # the rest of the node may be what is full
    yield one_key("cluster.pinned_share", [f"{n / 20:g}" for n in fewer])
    yield from _with_kv_budget(job, "cluster", "nodes", tuple(c.nodes * k for k in (2, 3, 4, 6, 8)))
    yield one_key("cluster.host_memory_gb", tuple(f"{c.host_memory_gb * k / 8:.6g}" for k in range(9, 33)))
    if job.disaggregated:
        tp = job.rollout_tp
        yield from _with_kv_budget(job, "cluster", "rollout_gpus", range(job.rollout_gpus + tp, job.gpus, tp))
        yield one_key("cluster.rollout_gpus", range((job.rollout_gpus - 1) // tp * tp, 0, -tp))
    if c.capacity_gib is not None:
        yield one_key("cluster.capacity_gib", _capacities(job, c.capacity_gib))


def _capacities(job: Job, gib: float) -> tuple[str, ...]:
    """A stated capacity may rise to what the GPU has; on a cpu, where it is a budget, to four times itself."""
    most = 4 * gib if job.on_host else job.device.usable_gib
    grown = (gib * (1 + k / 16) for k in range(1, 49))
    return (*(size_text(g) for g in grown if g < most), *([size_text(most)] if most > gib else []))
