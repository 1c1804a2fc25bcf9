"""A node's host memory: pinned pools, processes and the batch, counted again from the job and the places of the plan.

    node.pinned_bytes    GPUs of a pool x the end of its last place
    node.process_bytes   processes x what one keeps
    node.batch_bytes     ids, masks, log-probabilities, pixels: at the controller, and at every training rank

Which node is the fullest is decided here too. On the host backend processes and the batch are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.ir.check.facts import TIMELINE, Facts
from rollplex.ir.check.rules import Violation
from rollplex.ir.hardware import PROCESS_HOST_MIB
from rollplex.ir.job import Job
from rollplex.ir.planned_node import BATCH, PROCESSES, NodeMemory

TOKEN_ID, TOKEN_LOGPROB, TOKEN_MASK = 8, 4, 1


def step_bytes(job: Job) -> int:
    """Bytes of a step's prompts and responses at their budgets."""
    work, vision = job.workload, job.spec.vision
    prompt = (TOKEN_ID + TOKEN_MASK) * work.prompt_tokens
    if vision is not None and work.frames:
        visual = vision.max_visual_tokens(work.frames, work.max_pixels) if work.max_pixels else work.prompt_tokens
        patch = vision.channels * vision.temporal_patch * vision.patch * vision.patch * job.itemsize
        prompt += min(visual, work.prompt_tokens) * vision.merge * vision.merge * patch
    response = (TOKEN_ID + TOKEN_LOGPROB + TOKEN_MASK) * work.response_tokens
    trajectory = work.turn_count * response + (work.turn_count - 1) * seen_bytes(job)
    return work.prompts * prompt + work.prompts * work.group * trajectory


def seen_bytes(job: Job) -> int:
    """Bytes of one observation at its budget: tokens, and the patches of its frames."""
    turns, vision = job.workload.turns, job.spec.vision
    if turns is None:
        return 0
    found = (TOKEN_ID + TOKEN_MASK) * turns.observation_tokens
    if vision is not None and turns.frames:
        visual, most = turns.observation_tokens, job.workload.max_pixels
        visual = min(visual, vision.max_visual_tokens(turns.frames, most)) if most else visual
        found += visual * vision.merge**2 * vision.channels * vision.temporal_patch * vision.patch**2 * job.itemsize
    return found


def _node(facts: Facts, job: Job, index: int) -> NodeMemory:
    """The node of this number: the training pool has the first GPUs of the cluster."""
    per_node, first = job.cluster.gpus_per_node, job.pool(TIMELINE)
    train = sorted((0, job.train_gpus - index * per_node, per_node))[1]
    on = {pool: train if pool == first else per_node - train for pool in job.pools}
    ends = dict.fromkeys(on, 0)
    for place in facts.plan.summary.host_pool.offsets:
        ends[place.pool] = max(ends.get(place.pool, 0), place.offset + place.bytes)
    engines = on[first] + on[job.pool("rollout")]
    stated, controller = job.cluster.process_host_gib, index == 0
    each = round(stated * 2**30) if stated is not None else 0 if job.on_host else PROCESS_HOST_MIB * 2**20
    step = 0 if job.on_host else step_bytes(job)
    return NodeMemory(
        gpus={pool: n for pool, n in on.items() if n},
        controller=controller,
        capacity_bytes=round(job.cluster.host_memory_gb * 10**9),
        pinned_bytes=sum(n * ends[pool] for pool, n in on.items()),
        process_bytes=each * (engines + controller),
        batch_bytes=on[first] * -(-step // job.data_parallel(job.policy)) + step * controller,
    )


def on_node(facts: Facts, window: str) -> dict[str, int]:
    """What an explanation of a full node lists: objects at the host over its GPUs, processes, the batch."""
    node, found = facts.plan.summary.node, dict[str, int]()
    for o in facts.objects.values():
        if o.host_backed or o.residency.get(window) == "host":
            found[o.name] = o.bytes * node.gpus.get(facts.plan.processes[o.process].pool, 0)
    found |= {PROCESSES: node.process_bytes, BATCH: node.batch_bytes}
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def check_node(facts: Facts) -> Iterator[Violation]:
    """The plan's figures are those of its fullest node, and a feasible plan has room for them."""
    job = facts.job
    if job is None:
        return  # told by the rules on what is asked
    told, batch, step = facts.plan.summary.node, facts.plan.summary.batch_bytes, step_bytes(job)
    if batch != step:
        yield Violation("node-memory", f"batch_bytes are {batch:,}, the job's step has {step:,}", where="summary")
    last, mixed = job.cluster.nodes - 1, job.train_gpus // job.cluster.gpus_per_node
    found = [_node(facts, job, i) for i in sorted({0, min(1, last), min(mixed, last), last})]
    right = max(found, key=lambda n: n.total_bytes)
    if told != right:
        wrong = [f for f in NodeMemory.model_fields if getattr(told, f) != getattr(right, f)]
        what = "; ".join(f"{f} {getattr(told, f)}, by its parts {getattr(right, f)}" for f in wrong)
        yield Violation("node-memory", what, nbytes=right.total_bytes, where="summary.node")
