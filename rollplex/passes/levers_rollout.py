"""What can be changed in the rollout engine: how it cuts the model, and the memory it takes for KV and its profile.

for lever in rollout(job): print(lever)

    roles.actor.rollout.tensor_parallel=8
    roles.actor.rollout.kv_cache_gib=28 .. roles.actor.rollout.kv_cache_gib=24.12
    roles.actor.rollout.max_num_batched_tokens=4096 roles.actor.rollout.gpu_memory_utilization=0.71 ..

A KV budget never goes below what the work takes: less would queue, and no predicted time knows of a queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rollplex.ir.job import Job
from rollplex.ir.serving import budget
from rollplex.ir.sizes import gib_to_nbytes
from rollplex.passes.lever import Lever, Overrides, one_key, size_text, size_up
from rollplex.passes.levers_engines import wider

LEAST_BATCHED_TOKENS = 2048
"""vLLM's own default for chunked prefill; fewer starve the GPU."""


def rollout(job: Job) -> Iterator[Lever]:
    """Decisions on the policy's rollout engine; a lever without a step is left out by the caller."""
    section = job.roles[job.policy].rollout
    assert section is not None
    yield one_key(_key(job, "tensor_parallel"), wider(job, section.tensor_parallel))
    if job.spec.vision and section.mm_encoder_tp_mode == "data":
        yield one_key(_key(job, "mm_encoder_tp_mode"), ("weights",) if section.tensor_parallel > 1 else ())
    if section.kv_cache_gib is not None:
        yield _kv_budget(job, section.kv_cache_gib)
    elif section.gpu_memory_utilization is not None:
        yield one_key(_key(job, "gpu_memory_utilization"), _shares(job, section.gpu_memory_utilization))
        if section.runtime_gib is None:
            yield from _profile(job, section.max_num_batched_tokens, section.max_num_seqs)


def _key(job: Job, key: str) -> str:
    return f"roles.{job.policy}.rollout.{key}"


# ---- a stated KV budget


def _kv_budget(job: Job, gib: float) -> Lever:
    """From the stated budget down to what the work takes, in steps that can be read."""
    need, step = job.rollout_kv_need_bytes, 2.0 ** math.floor(math.log2(max(gib, 2**-20) / 16))
    first = math.ceil(gib / step) - 1
    budgets = [n * step for n in range(first, 0, -1) if gib_to_nbytes(n * step) >= need]
    least = size_up(need)
    tight = [least] if gib_to_nbytes(least) < gib_to_nbytes(budgets[-1] if budgets else gib) else []
    return one_key(_key(job, "kv_cache_gib"), [size_text(b) for b in (*budgets, *tight)])


# ---- a share of the memory


def _shares(job: Job, now: float) -> tuple[str, ...]:
    """Shares in hundredths below the present one that still hold the work's KV."""
    least = least_share(job)
    return tuple(f"{n / 100:g}" for n in range(math.ceil(now * 100) - 1, 0, -1) if least is not None and n >= least)


def least_share(job: Job) -> int | None:
    """Hundredths of the memory that hold the work's KV beside weights, profile and context; None where none do."""
    found, page = budget(job), job.device.page_bytes
    assert found is not None
    need = -(-job.rollout_kv_need_bytes // page) * page + found.weights + found.peak + found.context
    least = math.ceil(need * 100 / job.capacity_bytes)
    return least if least < 100 else None


def _profile(job: Job, tokens: int, sequences: int) -> Iterator[Lever]:
    """A smaller profile run, and the share lowered by what it frees: by itself it would only make the KV cache larger.

    As many sequences as the work has stay allowed at a time, so that nothing queues.
    """
    together = job.prompts_per_engine * job.group
    least = {"max_num_batched_tokens": max(LEAST_BATCHED_TOKENS, sequences), "max_num_seqs": together}
    for key, now in (("max_num_batched_tokens", tokens), ("max_num_seqs", sequences)):
        halves = [now // 2**k for k in range(1, 8) if now // 2**k > least[key]]
        values = [*halves, least[key]] if least[key] < now else []
        yield Lever(tuple(step for value in values if (step := _with_share(job, key, value))))


def _with_share(job: Job, key: str, value: int) -> Overrides | None:
    """The value beside the least share, where that is less than the present one."""
    policy = job.roles[job.policy]
    assert policy.rollout is not None
    section = policy.rollout.model_copy(update={key: value})
    roles = {**job.roles, job.policy: policy.model_copy(update={"rollout": section})}
    less = budget_for(job.model_copy(update={"roles": roles}))
    return (f"{_key(job, key)}={value}", less) if less else None


def budget_for(job: Job) -> str | None:
    """The override that lowers the KV budget to what the job's work takes; None where that is no less."""
    section = job.roles[job.policy].rollout
    assert section is not None
    if section.gpu_memory_utilization is None:
        need = job.rollout_kv_need_bytes
        return f"{_key(job, 'kv_cache_gib')}={size_text(size_up(need))}" if need < job.kv_cache_bytes else None
    least = least_share(job)
    lower = least is not None and least / 100 < section.gpu_memory_utilization
    return f"{_key(job, 'gpu_memory_utilization')}={(least or 0) / 100:g}" if lower else None
