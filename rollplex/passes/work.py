"""The work of a role on one prompt group, from the job: what size formulas and cost formulas are evaluated on."""

from __future__ import annotations

from dataclasses import replace

from rollplex.backends.facts import Work
from rollplex.ir.hardware import CONTEXT_MIB, communication_mib
from rollplex.ir.job import Job
from rollplex.ir.models import Part
from rollplex.ir.sizes import gib_to_nbytes

MIB = 2**20


def patches(job: Job, role: str) -> int:
    """Vision patches of one prompt at most: the processor's bound where the job states it, else all tokens."""
    vision, load = job.spec_of(role).vision, job.workload
    if vision is None:
        return 0
    tokens = load.prompt_tokens
    if load.max_pixels is not None:
        tokens = min(tokens, vision.max_visual_tokens(load.frames, load.max_pixels))
    return tokens * vision.merge**2


def role_work(job: Job, role: str) -> Work:
    """The work of a trained or scoring role, all responses of a group at once."""
    engine, spec = job.trainer(role), job.spec_of(role)
    return Work(
        spec=spec,
        tp=engine.tensor_parallel,
        itemsize=job.itemsize,
        sequence_parallel=engine.sequence_parallel,
        recompute=job.roles[role].recompute == "full",
        prompt_tokens=job.workload.prompt_tokens,
        patches=patches(job, role),
        responses=job.group,
        response_tokens=job.workload.response_tokens,
        vision_grad=spec.vision is not None and trains_vision(job, role),
    )


def trains_vision(job: Job, role: str) -> bool:
    """Whether the role's vision tower receives gradients."""
    return job.roles[role].train is not None and "vision" not in job.roles[role].freeze


def communicators(job: Job, process: str, shared: bool) -> tuple[str, ...]:
    """Groups of more than one GPU that a training or rollout rank belongs to, `tp8`.

    q gathers a shared snapshot; refresh spans both pools of a disaggregated job.
    """
    apart = [("refresh", job.gpus)] if job.disaggregated else []
    if process == "rollout":
        found = [("tp", job.rollout_tp), *apart]
    else:
        found = [("tp", job.trainer(role).tensor_parallel) for role in job.roles]
        found += [("dp", job.data_parallel(role)) for role in job.trained]
        found += [("q", job.q if shared else 1), *apart]
    return tuple(dict.fromkeys(f"{name}{size}" for name, size in found if size > 1))


def process_bytes(job: Job, groups: tuple[str, ...]) -> int:
    """CUDA context and NCCL buffers of one process: the job's figures, else the measured ones; nothing on the host."""
    cluster = job.cluster
    context = CONTEXT_MIB * MIB if cluster.context_gib is None else gib_to_nbytes(cluster.context_gib)
    nccl = communication_mib(len(groups)) * MIB if cluster.nccl_gib is None else gib_to_nbytes(cluster.nccl_gib)
    return 0 if job.on_host else context + (nccl if groups else 0)


def one_response(work: Work, responses: int = 1) -> Work:
    """The same work on fewer responses."""
    return replace(work, responses=responses)


def whole_call(work: Work) -> Work:
    """The work of a call that is not split: every response is run with its prompt before it."""
    return replace(work, response_tokens=work.prompt_tokens + work.response_tokens)


def trained_parameters(job: Job, role: str) -> int:
    """Parameters a training rank updates."""
    tp, frozen = job.trainer(role).tensor_parallel, job.roles[role].freeze
    parts: tuple[Part, ...] = ("language", "vision")
    return sum(job.spec_of(role).rank_parameters(tp, part) for part in parts if part not in frozen)


def shares_tower(job: Job, role: str) -> bool:
    """Whether a role sees through the policy's frozen tower: of the same weights, and neither is trained."""
    if job.spec.vision is None or trains_vision(job, job.policy) or role == job.policy:
        return False
    return job.roles[role].model is None and not trains_vision(job, role)
