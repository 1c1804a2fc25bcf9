"""What can be changed in a job, one decision at a time: from the mildest change to the most drastic.

for lever in levers(job): print(lever)

    workload.prompts=30 .. workload.prompts=2
    roles.actor.rollout.kv_cache_gib=28 .. roles.actor.rollout.kv_cache_gib=24.12
    optimizer.in_flight=2 .. optimizer.in_flight=1
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from rollplex.ir.job import Job
from rollplex.ir.job_schema import Ablation, Role
from rollplex.ir.sizes import gib_to_nbytes

STEPS = 64
"""At most so many values of one key are told apart."""


Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Lever:
    """One decision: for each of its values the `key=value` overrides that state it, the mildest change first."""

    steps: tuple[Overrides, ...]

    @property
    def keys(self) -> frozenset[str]:
        """The keys it sets."""
        return frozenset(key_of(o) for o in self.steps[0])

    def __str__(self) -> str:
        ends = dict.fromkeys((self.steps[0], self.steps[-1]))
        return " .. ".join(" ".join(overrides) for overrides in ends)


def key_of(override: str) -> str:
    """The key of `key=value`."""
    return override.partition("=")[0]


def levers(job: Job) -> tuple[Lever, ...]:
    """Every decision that can make a job smaller or its machines larger; what is legal is the job's to say."""
    found = (*_mechanisms(job), *_roles(job), *_workload(job), *_update(job), *_machines(job))
    return tuple(lever for lever in found if lever.steps)


def _lever(key: str, values: Sequence[object]) -> Lever:
    """One key; of many values evenly spread ones, and the last one."""
    return Lever(tuple((f"{key}={value}",) for value in _spread(values)))


def _spread(values: Sequence[Any]) -> Sequence[Any]:
    stride = -(-len(values) // STEPS) or 1
    return values[::-1][::stride][::-1]


# ---- what the schedule does


def _mechanisms(job: Job) -> Iterator[Lever]:
    others = [s for s in ("rollplex", "serial") if s != job.schedule]
    yield _lever("schedule", others if job.schedule != "serial" else ())
    for mechanism in (a for a in get_args(Ablation) if a in job.ablate):
        rest = [a for a in job.ablate if a != mechanism]
        yield _lever("ablate", (f"[{','.join(rest)}]",))
    if len(job.ablate) > 1:
        yield _lever("ablate", ("[]",))


# ---- roles and their engines


def _roles(job: Job) -> Iterator[Lever]:
    for name, role in job.roles.items():
        if role.train:
            redone = get_args(Role.model_fields["recompute"].annotation)
            yield _lever(f"roles.{name}.recompute", redone[redone.index(role.recompute) + 1 :])
            if role.prefix_saved != "auto":
                yield _lever(f"roles.{name}.prefix_saved", ("auto",))
        for section in ("train", "score"):
            if getattr(role, section):
                now = getattr(role, section).tensor_parallel
                yield _lever(f"roles.{name}.{section}.tensor_parallel", _wider(job, now))
    rollout = job.roles[job.policy].rollout
    assert rollout is not None
    yield _lever(f"roles.{job.policy}.rollout.tensor_parallel", _wider(job, rollout.tensor_parallel))
    if rollout.kv_cache_gib is not None:
        yield _kv_budget(job, rollout.kv_cache_gib)


def _wider(job: Job, now: int) -> tuple[str, ...]:
    """Tensor-parallel degrees beyond the present one that stay within a node."""
    return tuple(str(tp) for tp in job.spec.legal_tp() if now < tp <= job.cluster.gpus_per_node)


def _kv_budget(job: Job, gib: float) -> Lever:
    """From the stated budget down to what the work takes, in steps that can be read."""
    need, step = job.rollout_kv_need_bytes, 2.0 ** math.floor(math.log2(max(gib, 2**-20) / 16))
    first = math.ceil(gib / step) - 1
    budgets = [n * step for n in range(first, 0, -1) if gib_to_nbytes(n * step) >= need]
    least = _up(need)
    tight = [least] if gib_to_nbytes(least) < gib_to_nbytes(budgets[-1] if budgets else gib) else []
    texts = [size_text(b) for b in (*budgets, *tight)]
    return _lever(f"roles.{job.policy}.rollout.kv_cache_gib", texts)


def _up(nbytes: int) -> float:
    """GiB that hold these bytes, rounded up to a hundredth of the unit that fits."""
    unit = 2**30 if nbytes >= 2**30 else 2**20
    return math.ceil(nbytes / unit * 100) / 100 * unit / 2**30


def size_text(gib: float) -> str:
    """A size as a value of a key in GiB: `27.04`, or `7.5MiB` where GiB would be unreadable."""
    return f"{gib:.10g}" if gib >= 1 else f"{gib * 1024:.10g}MiB"


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
        yield _lever(f"workload.{key}", values)
        yield _with_kv_budget(job, key, values)
    if job.spec.vision and work.frames:
        yield _lever("workload.max_pixels", _fewer_pixels(job))


def _with_kv_budget(job: Job, key: str, values: Sequence[int]) -> Lever:
    """The same values, each with the KV budget lowered to what the smaller work takes."""
    steps, budget = [], job.roles[job.policy].rollout
    assert budget is not None
    for value in _spread(values):
        workload = job.workload.model_copy(update={key: value})
        need = job.model_copy(update={"workload": workload}).rollout_kv_need_bytes
        if budget.kv_cache_gib is None:
            steps.append((f"workload.{key}={value}",))
        elif need < job.kv_cache_bytes:
            kv = f"roles.{job.policy}.rollout.kv_cache_gib={size_text(_up(need))}"
            steps.append((f"workload.{key}={value}", kv))
    return Lever(tuple(steps))


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
        yield _lever("optimizer.chunks", ("auto",))
    elif job.ablate and "chunked_optimizer" not in job.ablate:  # it holds the chunks of the full schedule
        yield _lever("optimizer.chunks", tuple(str(2**k) for k in range(3, 8)))
    yield _lever("optimizer.in_flight", tuple(str(n) for n in range(optimizer.in_flight - 1, 0, -1)))


# ---- the machines


def _machines(job: Job) -> Iterator[Lever]:
    c = job.cluster
    yield _lever("cluster.nodes", tuple(str(c.nodes * k) for k in (2, 3, 4, 6, 8)))
    yield _lever("cluster.host_memory_gb", tuple(f"{c.host_memory_gb * k / 8:.6g}" for k in range(9, 33)))
    if c.capacity_gib is not None:
        yield _lever("cluster.capacity_gib", _capacities(job, c.capacity_gib))


def _capacities(job: Job, gib: float) -> tuple[str, ...]:
    """A stated capacity may rise to what the GPU has; on a cpu, where it is a budget, to four times itself."""
    most = 4 * gib if job.on_host else job.device.usable_gib
    grown = (gib * (1 + k / 16) for k in range(1, 49))
    return (*(size_text(g) for g in grown if g < most), *([size_text(most)] if most > gib else []))
