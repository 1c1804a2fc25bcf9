"""What a rollout engine takes of a GPU, and what it leaves for KV: vLLM's share of the total memory.

    kv = gpu_memory_utilization x total - weights - peak of the profile run - context

The share is of the total memory, whatever else lives there; the peak is the engine's (activations of
`max_num_batched_tokens` tokens, logits of `max_num_seqs` sequences, the largest image, CUDA graphs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex.ir.engines import engine, is_so
from rollplex.ir.hardware import CONTEXT_MIB, communication_mib
from rollplex.ir.lora import served_bytes
from rollplex.ir.sizes import gib_to_nbytes
from rollplex.ir.spec import ModelSpec

if TYPE_CHECKING:
    from rollplex.ir.job import Job

RUNTIME_GIB = 3.0
KV_BLOCK_TOKENS = 16
CPU_KV_BLOCK_TOKENS = 32
"""The least that the attention kernels of vLLM on a CPU take."""
IMAGE_TOKENS = 16384
"""Visual tokens of the largest image that Qwen's processors allow by default (max_pixels)."""
MIB = 2**20


@dataclass(frozen=True)
class Serving:
    """What a rollout rank is set up for."""

    spec: ModelSpec
    tp: int
    itemsize: int
    batched_tokens: int
    sequences: int
    image_tokens: int
    tower_ways: int
    adapter_bytes: int = 0


@dataclass(frozen=True)
class Budget:
    """Bytes of one GPU that a rollout engine divides up."""

    share: int
    weights: int
    peak: int
    context: int

    @property
    def kv(self) -> int:
        """What is left for KV; negative where nothing is."""
        return self.share - self.weights - self.peak - self.context


def serving(job: Job) -> Serving:
    """The set-up of the policy's rollout engine."""
    rollout = job.roles[job.policy].rollout
    assert rollout is not None
    vision, pixels = job.spec.vision, job.workload.max_pixels
    image = 0 if vision is None else vision.max_visual_tokens(1, pixels) if pixels else IMAGE_TOKENS
    ways = rollout.tensor_parallel if rollout.mm_encoder_tp_mode == "weights" else 1
    return Serving(
        job.spec, rollout.tensor_parallel, job.itemsize, rollout.max_num_batched_tokens, rollout.max_num_seqs,
        image, ways, served_bytes(job),
    )  # fmt: skip


def weight_bytes(s: Serving) -> int:
    """Weights of one rank: its shard of the language model, the tower whole or cut, and the adapters that it serves."""
    own = s.spec.rank_parameters(s.tp, "language") + -(-s.spec.vision_parameters // s.tower_ways)
    return own * s.itemsize + s.adapter_bytes


def communicators(job: Job) -> tuple[str, ...]:
    """NCCL's communicators among the ranks of a rollout engine, which may have several; a rank alone has none."""
    rollout = job.roles[job.policy].rollout
    assert rollout is not None
    own = getattr(engine(rollout.engine), "communicators", None)
    return () if job.rollout_tp == 1 else own(job.spec) if own else ("tp",)


def all_reduce_bytes(job: Job) -> int:
    """Buffers of a rollout engine's own all-reduces, beside NCCL's; nothing where the job states NCCL's."""
    rollout = job.roles[job.policy].rollout
    assert rollout is not None
    alone = job.rollout_tp == 1 or job.cluster.nccl_gib is not None
    return 0 if alone else getattr(engine(rollout.engine), "all_reduce_bytes", 0)


def context_bytes(job: Job) -> int:
    """CUDA context and buffers of NCCL and all-reduces of a rollout process when its engine starts.

    A pool apart is refreshed over a group that comes later.
    """
    cluster, groups = job.cluster, len(communicators(job))
    context = CONTEXT_MIB * MIB if cluster.context_gib is None else gib_to_nbytes(cluster.context_gib)
    nccl = communication_mib(groups) * MIB if cluster.nccl_gib is None else gib_to_nbytes(cluster.nccl_gib)
    return 0 if job.on_host else context + (nccl if groups else 0) + all_reduce_bytes(job)


def budget(job: Job) -> Budget | None:
    """The division under `gpu_memory_utilization`; None where the job states the KV budget itself."""
    rollout = job.roles[job.policy].rollout
    assert rollout is not None
    if rollout.gpu_memory_utilization is None:
        return None
    setup, share = serving(job), int(rollout.gpu_memory_utilization * job.capacity_bytes)
    stated = rollout.runtime_gib
    peak = engine(rollout.engine).profile_bytes(setup) if stated is None else gib_to_nbytes(stated)
    return Budget(share, weight_bytes(setup), peak, context_bytes(job))


def kv_cache_bytes(job: Job) -> int:
    """KV cache of one GPU: as stated, or what the share leaves, in whole pages."""
    rollout, found, page = job.roles[job.policy].rollout, budget(job), job.device.page_bytes
    assert rollout is not None
    if found is not None:
        return max(0, found.kv) // page * page
    return gib_to_nbytes(rollout.kv_cache_gib or 0)


def kv_block_tokens(job: Job) -> int:
    """Tokens of one block of KV in the rollout engine."""
    rollout = job.roles[job.policy].rollout
    assert rollout is not None
    large = job.on_host and is_so(rollout.engine, "large_cpu_blocks")
    return CPU_KV_BLOCK_TOKENS if large else KV_BLOCK_TOKENS


def kv_need_bytes(job: Job) -> int:
    """KV bytes of one rollout rank when every prompt and response fills its budget and none is preempted.

    Responses share the full blocks before the last prompt token; each has its own copy of the rest, and of all that
    later turns add to it: a trajectory stays on its engine.
    """
    work, block = job.workload, kv_block_tokens(job)
    shared = (work.prompt_tokens - 1) // block
    own = math.ceil((work.trajectory_tokens - shared * block) / block)
    blocks = job.prompts_per_engine * (shared + work.group * own) + 1  # vLLM keeps one null block
    return blocks * block * job.spec.kv_bytes_per_token(job.rollout_tp, job.itemsize)


def runtime_bytes(job: Job) -> int:
    """Buffers of the engine beside weights and KV, one GPU."""
    rollout, found = job.roles[job.policy].rollout, budget(job)
    assert rollout is not None
    if found is not None:
        return found.peak
    return gib_to_nbytes(RUNTIME_GIB if rollout.runtime_gib is None else rollout.runtime_gib)


def model_length(job: Job) -> int:
    """Most tokens of a sequence that the engine takes."""
    rollout = job.roles[job.policy].rollout
    assert rollout is not None
    return rollout.max_model_len or job.workload.trajectory_tokens
