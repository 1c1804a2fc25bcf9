"""Bytes of one step's batch: prompts, pixels and responses, from generation to update in the controller's host memory.

65,536 samples of 1024 + 4096 tokens take 3.3 GiB where 8,192 take 0.4; pixels come on top, once a prompt

It is no object of the state contract: no GPU holds more of it than a microbatch, and it is not pinned. But it is there,
it grows with the step, and `node_memory` counts it against the host memory of a node.
"""

from __future__ import annotations

from rollplex.ir.job import Job
from rollplex.ir.work import patches, seen_patches

ID, LOGPROB, MASK = 8, 4, 1
"""Bytes of a token id, of the log-probability it was sampled with, of its place in a mask."""


def batch_bytes(job: Job) -> int:
    """All prompts and responses of a step at their budgets, over all GPUs."""
    work = job.workload
    prompt = work.prompt_tokens * (ID + MASK) + pixel_bytes(job)
    response = work.response_tokens * (ID + LOGPROB + MASK)
    return work.prompts * (prompt + work.group * (work.turn_count * response + seen_bytes(job)))


def pixel_bytes(job: Job) -> int:
    """Patches of one prompt's frames as the vision tower reads them; none for a step of text."""
    return patches(job, job.policy) * _patch_bytes(job) if job.workload.frames else 0


def seen_bytes(job: Job) -> int:
    """All observations of one trajectory."""
    turns = job.workload.turns
    if turns is None:
        return 0
    one = turns.observation_tokens * (ID + MASK) + seen_patches(job, job.policy) * _patch_bytes(job)
    return (turns.count - 1) * one


def _patch_bytes(job: Job) -> int:
    vision = job.spec.vision
    return vision.channels * vision.temporal_patch * vision.patch**2 * job.itemsize if vision else 0
