"""What a job's LoRA means for its roles: what is trained, what the rollout engine holds, who reads the base weights.

roles.actor.lora: {rank: 64}      actor.base       BF16, never written: trainer, rollout engine and reference read it
                                  actor.snapshot   BF16 adapters, with FP32 gradients, masters and moments of their size
                                  rollout.adapters the rollout engine's copy of them, refreshed after every update
served: merged                    rollout.weights  base + B A, the rollout engine's own
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rollplex.ir.engines import engine
from rollplex.ir.spec import Adapters, ModelSpec, Part

if TYPE_CHECKING:
    from rollplex.ir.job import Job
    from rollplex.ir.job_schema import Lora


def lora_of(job: Job) -> Lora | None:
    """The adapters that the policy trains instead of its weights."""
    return job.roles[job.policy].lora


def trained_spec(job: Job, role: str) -> ModelSpec:
    """What is trained of a role's model: its adapters, cut as the trainer cuts them, or the model itself."""
    lora, spec = job.roles[role].lora, job.spec_of(role)
    if lora is None:
        return spec
    fused = frozenset(engine(job.trainer(role).engine).fuses)
    return replace(spec, adapters=Adapters(lora.rank, lora.targets, fused))


def trained_parts(job: Job, role: str) -> tuple[Part, ...]:
    """Parts of a trained role that are not frozen."""
    parts: tuple[Part, ...] = ("language", "vision")
    return tuple(p for p in parts if p not in job.roles[role].freeze)


def serves_adapters(job: Job) -> bool:
    """Whether the rollout engine applies adapters beside the weights."""
    return (lora := lora_of(job)) is not None and lora.served == "adapter"


def merges(job: Job) -> bool:
    """Whether the rollout engine reads a copy of its own, into which the adapters are merged."""
    return (lora := lora_of(job)) is not None and lora.served == "merged"


def served_spec(job: Job) -> ModelSpec | None:
    """The adapters as the rollout engine makes room for them; None where it reads none."""
    lora, rollout = lora_of(job), job.roles[job.policy].rollout
    if lora is None or rollout is None or not serves_adapters(job):
        return None
    rooms = [r for r in adapter_ranks(rollout.engine) if r >= lora.rank]
    return replace(job.spec, adapters=Adapters(min(rooms, default=lora.rank), lora.targets, split=False))


def adapter_ranks(name: str) -> tuple[int, ...]:
    """Ranks that a rollout engine makes room for; empty where it makes room for any."""
    return tuple(getattr(engine(name), "adapter_ranks", ()))


def served_bytes(job: Job) -> int:
    """Bytes of the adapters on one rollout rank."""
    spec = served_spec(job)
    return spec.rank_parameters(job.rollout_tp, "language") * job.itemsize if spec else 0


def reads_base(job: Job, role: str) -> bool:
    """Whether a frozen role is the policy with its adapters off: of the same weights, cut in the same way."""
    own, policy = job.roles[role], job.trainer(job.policy)
    if lora_of(job) is None or own.train or own.model or job.spec_of(role) != job.spec:
        return False
    same = (job.degrees(role), job.zero(role)) == (job.degrees(job.policy), job.zero(job.policy))
    return same and job.trainer(role).engine == policy.engine
