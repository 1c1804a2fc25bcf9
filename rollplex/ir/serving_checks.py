"""Whether a rollout engine has memory and length for its work, before anything is planned.

job.yaml:15: 20.0 GiB of KV cache are 4.1 GiB short: 16 prompts x (8192 + 8 x 2048) tokens on one engine take 24.1 GiB
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollplex.ir.findings import Finding, KeyPath
from rollplex.ir.job_text import lengths
from rollplex.ir.serving import budget, model_length
from rollplex.ir.sizes import pretty

if TYPE_CHECKING:
    from rollplex.ir.job import Job

_SIZES: tuple[KeyPath, ...] = (
    ("roles",),
    ("cluster", "nodes"),
    ("cluster", "gpus_per_node"),
    ("cluster", "rollout_gpus"),
    ("workload",),
    ("model",),
)


def serving_rules(job: Job) -> Iterator[Finding]:
    """What is wrong with the rollout section by itself."""
    here, rollout = ("roles", job.policy, "rollout"), job.roles[job.policy].rollout
    assert rollout is not None
    stated = [k for k in ("kv_cache_gib", "gpu_memory_utilization") if getattr(rollout, k) is not None]
    if not stated:
        yield Finding(here, "`kv_cache_gib` is missing", "kv_cache_gib, or gpu_memory_utilization")
    if len(stated) == 2:
        what = "kv_cache_gib and gpu_memory_utilization both say how much KV there is"
        yield Finding((*here, "gpu_memory_utilization"), what, "one of them", ((*here, "kv_cache_gib"),))
    if rollout.gpu_memory_utilization is not None and rollout.engine == "host":
        yield Finding((*here, "gpu_memory_utilization"), "engine host has no gpu_memory_utilization", "kv_cache_gib")
    yield from _length(job, here)
    yield from _cut_tower(job, here)


def _length(job: Job, here: KeyPath) -> Iterator[Finding]:
    work, length = job.workload, model_length(job)
    if (need := work.trajectory_tokens) > length:
        what = f"max_model_len {length} is less than {lengths(work)} tokens: responses would be cut off without a word"
        uses = (("workload", "prompt_tokens"), ("workload", "response_tokens"), ("workload", "turns"))
        yield Finding((*here, "max_model_len"), what, f"max_model_len: {need}, or smaller budgets", uses)


def _cut_tower(job: Job, here: KeyPath) -> Iterator[Finding]:
    """A tower cut over the ranks is the rollout engine's own, and its widths must divide."""
    rollout, vision = job.roles[job.policy].rollout, job.spec.vision
    assert rollout is not None
    key, tp = (*here, "mm_encoder_tp_mode"), rollout.tensor_parallel
    if rollout.mm_encoder_tp_mode == "data" or vision is None:
        return
    uses = ((*here, "tensor_parallel"), ("model",))
    if vision.ffn % tp or vision.heads % tp:
        what = f"tensor_parallel {tp} does not divide the tower's {vision.heads} heads and feed-forward {vision.ffn}"
        yield Finding(key, what, "mm_encoder_tp_mode: data", uses)
    if "vision" not in job.roles[job.policy].freeze:
        what = "a trained tower is read by both engines as one whole copy"
        yield Finding(key, what, "mm_encoder_tp_mode: data, or freeze: [vision]", (("roles", job.policy, "freeze"),))


def kv_rules(job: Job) -> list[Finding]:
    """Whether the KV cache holds the work, or under a share of memory at least one sequence."""
    return _stated(job) if budget(job) is None else _derived(job)


def _derived(job: Job) -> list[Finding]:
    found, length = budget(job), model_length(job)
    assert found is not None
    need = length * job.spec.kv_bytes_per_token(job.rollout_tp, job.itemsize)
    if found.kv >= need:
        return []
    rollout = job.roles[job.policy].rollout
    assert rollout is not None
    left = f"{pretty(found.kv)} of KV cache" if found.kv > 0 else f"{pretty(-found.kv)} less than nothing"
    what = (
        f"{rollout.gpu_memory_utilization:g} of {pretty(job.capacity_bytes)} is {pretty(found.share)}: weights "
        f"{pretty(found.weights)}, profile peak {pretty(found.peak)} and context {pretty(found.context)} leave {left}, "
        f"and one sequence of {length} tokens takes {pretty(need)}"
    )
    hint = "a larger tensor_parallel, a shorter max_model_len, or a larger gpu_memory_utilization"
    return [Finding(("roles", job.policy, "rollout", "gpu_memory_utilization"), what, hint, _SIZES)]


def _stated(job: Job) -> list[Finding]:
    held, need = job.kv_cache_bytes, job.rollout_kv_need_bytes
    if need <= held:
        return []
    work = job.workload
    own = f"{work.response_tokens}" if work.turns is None else f"{work.trajectory_tokens - work.prompt_tokens}"
    what = (
        f"{pretty(held)} of KV cache are {pretty(need - held)} short: "
        f"{job.prompts_per_engine} prompts x ({work.prompt_tokens} + {work.group} x {own}) tokens "
        f"on one engine take {pretty(need)} a GPU, and the engine would preempt"
    )
    up = math.ceil(need / 2**30 * 100) / 100 if need > 2**25 else math.ceil(need / 2**20 * 100) / 100
    unit = "" if need > 2**25 else " MiB"
    hint = f"kv_cache_gib: {up:g}{unit}, fewer prompts, a shorter budget, or a larger rollout tensor_parallel"
    return [Finding(("roles", job.policy, "rollout", "kv_cache_gib"), what, hint, _SIZES)]


def serving_notes(job: Job) -> Iterator[str]:
    """Under a share of memory the engine queues what its KV cache does not hold."""
    found = budget(job)
    if found is None or found.kv >= job.rollout_kv_need_bytes:
        return
    token = job.spec.kv_bytes_per_token(job.rollout_tp, job.itemsize)
    fit, all_of = found.kv // (model_length(job) * token), job.prompts_per_engine * job.group
    yield (
        f"roles.{job.policy}.rollout: {pretty(found.kv)} of KV cache hold {fit} whole sequences of {all_of}: the rest "
        "queue, and predicted decode times leave that out"
    )
