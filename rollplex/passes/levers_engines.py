"""What can be changed in the engines that train and score: how they cut a model, and what of it waits at the host.

for lever in trainers(job): print(lever)

    roles.actor.recompute=full
    roles.actor.train.pipeline_parallel=2 .. roles.actor.train.pipeline_parallel=4
    roles.actor.train.distributed_optimizer=true
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from rollplex.ir.job import Job
from rollplex.ir.job_schema import Role, Train
from rollplex.passes.lever import Lever, one_key

TRUE = ("true",)


def trainers(job: Job) -> Iterator[Lever]:
    """Decisions on every role's training or scoring engine; a lever without a step is left out by the caller."""
    for name, role in job.roles.items():
        if role.train:
            yield from _activations(name, role)
        here, engine = f"roles.{name}.{'train' if role.train else 'score'}", job.trainer(name)
        if job.whole_sequences(name):
            yield from _sharded(job, here, name, engine)
        elif not job.on_host:
            yield from _cut(job, here, name, engine)
            yield one_key(f"{here}.sequence_parallel", () if engine.sequence_parallel else TRUE)
        yield one_key(f"roles.{name}.attention", ("flash",) if role.attention != "flash" else ())


def _activations(name: str, role: Role) -> Iterator[Lever]:
    redone = get_args(Role.model_fields["recompute"].annotation)
    yield one_key(f"roles.{name}.recompute", redone[redone.index(role.recompute) + 1 :])
    yield one_key(f"roles.{name}.prefix_saved", ("auto",) if role.prefix_saved != "auto" else ())


def wider(job: Job, now: int) -> tuple[str, ...]:
    """Tensor-parallel degrees beyond the present one that stay within a node."""
    return tuple(str(tp) for tp in job.spec.legal_tp() if now < tp <= job.cluster.gpus_per_node)


def _cut(job: Job, here: str, name: str, engine: Train) -> Iterator[Lever]:
    """Degrees of an engine that cuts the model, and the optimizer's states over its replicas."""
    spec, gpus = job.spec_of(name), job.train_gpus
    yield one_key(f"{here}.tensor_parallel", wider(job, engine.tensor_parallel))
    stages = gpus // (engine.tensor_parallel * engine.context_parallel)
    yield one_key(f"{here}.pipeline_parallel", _divisors(spec.layers, engine.pipeline_parallel, stages))
    yield _longer_rings(job, here, engine)
    if spec.moe:
        ranks = gpus // (engine.tensor_parallel * engine.pipeline_parallel)
        yield one_key(f"{here}.expert_parallel", _divisors(math.gcd(spec.moe.experts, ranks), engine.expert_parallel))
    if job.roles[name].train and not job.cuts_optimizer(name) and job.degrees(name).replicas > 1:
        yield one_key(f"{here}.distributed_optimizer", TRUE)


def _longer_rings(job: Job, here: str, engine: Train) -> Lever:
    """Context-parallel degrees beyond the present one."""
    ranks = job.train_gpus // (engine.tensor_parallel * engine.pipeline_parallel)
    return one_key(f"{here}.context_parallel", _divisors(ranks, engine.context_parallel))


def _divisors(number: int, now: int, most: int | None = None) -> tuple[int, ...]:
    """Divisors beyond the present value, the least first."""
    return tuple(n for n in range(now + 1, min(number, most or number) + 1) if number % n == 0)


def _sharded(job: Job, here: str, name: str, engine: Train) -> Iterator[Lever]:
    """Keys of an engine that cuts states over its ranks and runs whole sequences."""
    yield one_key(f"{here}.zero", tuple(range(job.zero(name) + 1, 4)))
    if engine.microbatch != "auto":
        yield one_key(f"{here}.microbatch", _smaller(job.group, engine.microbatch))
    yield _longer_rings(job, here, engine)
    for key in ("offload_optimizer", "offload_parameters") if job.roles[name].train else ():
        yield one_key(f"{here}.{key}", () if getattr(engine, key) else TRUE)


def _smaller(number: int, now: int) -> tuple[int, ...]:
    """Divisors of a number below the present value, the largest first."""
    return tuple(n for n in range(now - 1, 0, -1) if number % n == 0)
