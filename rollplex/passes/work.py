"""What a rank of a role's engine holds, from the job: weights, trained and updated parameters, contexts, groups."""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.ir import serving
from rollplex.ir.hardware import CONTEXT_MIB, communication_mib
from rollplex.ir.job import Job
from rollplex.ir.lora import served_bytes, trained_parts, trained_spec
from rollplex.ir.models import Part
from rollplex.ir.planned_layout import LayoutSummary
from rollplex.ir.ranks import Ranks
from rollplex.ir.shards import Degrees, owned_parameters, rank_parameters
from rollplex.ir.sizes import gib_to_nbytes
from rollplex.ir.work import trains_vision

MIB = 2**20


def one_copy(job: Job) -> bool:
    """Whether one copy of the policy's weights serves both engines: they can share, and nothing switches that off."""
    return job.shares_weights and job.schedule != "naive" and "weight_sharing" not in job.ablate


def communicators(job: Job, process: str, gathers: tuple[int, ...]) -> tuple[str, ...]:
    """Groups of more than one GPU that a rank belongs to, `tp8`: of the same training ranks one, the first.

    q carries slabs of a shared snapshot between nodes, in groups of the sizes `gathers` (`between_nodes`): in a node
    ranks write into each other's pages. Refresh spans both pools of a disaggregated job.
    """
    if process == "rollout":
        apart = (f"refresh{job.gpus}",) if job.disaggregated else ()
        return (*(f"{name}{job.rollout_tp}" for name in serving.communicators(job)), *apart)
    found: dict[frozenset[int], str] = {}
    for name, ranks in _groups(job, gathers):
        if len(ranks) > 1:
            found.setdefault(ranks, f"{name}{len(ranks)}")
    return tuple(found.values())


def _groups(job: Job, gathers: tuple[int, ...]) -> Iterator[tuple[str, frozenset[int]]]:
    """The groups that the first training rank sends in by NCCL, with their ranks."""
    for d in map(job.degrees, job.roles):
        yield from (("tp", _block(d, tp=d.tp)), ("pp", _block(d, pp=d.pp)))
        yield from (("cp", _block(d, replicas=d.cp)), ("ep", _block(d, replicas=d.ep)))
    yield from (("dp", _block(d, replicas=d.replicas)) for d in map(job.degrees, job.trained))
    policy = job.degrees(job.policy)
    for size in gathers:  # q ranks of every stage; experts lie on several replicas too
        yield "q", _block(policy, tp=job.q, replicas=size // (job.q * policy.pp), pp=policy.pp)
    if job.disaggregated:
        yield "refresh", frozenset(range(job.gpus))


def between_nodes(job: Job, layout: LayoutSummary) -> tuple[int, ...]:
    """Sizes of the groups of several nodes that a shared snapshot comes from: experts in one of their own.

    None under LoRA, whose base weights never change.
    """
    degrees, per_node = job.degrees(job.policy), job.cluster.gpus_per_node
    ranks, found = Ranks(degrees, job.gpus), dict[int, None]()
    for c in layout.classes if job.cluster.nodes > 1 else ():
        experts = c.name.startswith("expert_")
        tensors = max(1, c.group // (degrees.pp * (degrees.ep if experts else 1)))
        if c.group > 1 and ranks.spans_nodes(tensors, experts, per_node):
            found[c.group] = None
    return tuple(found)


def _block(d: Degrees, tp: int = 1, replicas: int = 1, pp: int = 1) -> frozenset[int]:
    """The first so many ranks each way, in Megatron-Core's order: tensor, context and data, pipeline parallel."""
    return frozenset(
        t + d.tp * (r + d.replicas * stage) for t in range(tp) for r in range(replicas) for stage in range(pp)
    )


def process_bytes(job: Job, groups: tuple[str, ...], buffers: int = 0) -> int:
    """CUDA context and NCCL buffers of one process: the job's figures, else the measured ones; nothing on the host.

    Beside them an engine's own `buffers`.
    """
    cluster = job.cluster
    context = CONTEXT_MIB * MIB if cluster.context_gib is None else gib_to_nbytes(cluster.context_gib)
    nccl = communication_mib(len(groups)) * MIB if cluster.nccl_gib is None else gib_to_nbytes(cluster.nccl_gib)
    return 0 if job.on_host else context + (nccl if groups else 0) + buffers


def held_parameters(job: Job, role: str, part: Part) -> int:
    """Parameters of a part on a rank of the role's training or scoring engine, of the stage with most."""
    return rank_parameters(job.spec_of(role), job.degrees(role), part)


def weight_bytes(job: Job, role: str, part: Part) -> int:
    """Weights of a part on a rank; under ZeRO-3 a share, in FP32 where they are trained: they are the masters."""
    updated = job.roles[role].train is not None and job.roles[role].lora is None
    return _held_bytes(job, role, held_parameters(job, role, part), updated)


def adapter_bytes(job: Job, role: str) -> int:
    """The adapters that a role trains, on a rank; under ZeRO-3 a share of them, in FP32: they are the masters."""
    held = rank_parameters(trained_spec(job, role), job.degrees(role), *trained_parts(job, role))
    return _held_bytes(job, role, held, updated=True)


def _held_bytes(job: Job, role: str, held: int, updated: bool) -> int:
    if job.zero(role) < 3:
        return held * job.itemsize
    return -(-held // job.degrees(role).replicas) * (max(4, job.itemsize) if updated else job.itemsize)


def decoded_bytes(job: Job) -> int:
    """Weights that a rollout rank reads in every step of decode: its shard of the language model, its adapters."""
    return job.spec.rank_parameters(job.rollout_tp, "language") * job.itemsize + served_bytes(job)


def trained_parameters(job: Job, role: str) -> int:
    """Parameters a training rank keeps gradients for: all it trains, or from ZeRO-2 on its share of them."""
    if job.zero(role) > 1:
        return updated_parameters(job, role)
    return rank_parameters(trained_spec(job, role), job.degrees(role), *trained_parts(job, role))


def updated_parameters(job: Job, role: str) -> int:
    """Parameters whose master weights and moments a rank keeps: all it trains, or its share of them."""
    if not job.cuts_optimizer(role):
        return trained_parameters(job, role)
    return owned_parameters(trained_spec(job, role), job.degrees(role), *trained_parts(job, role))


def lacking_parameters(job: Job, role: str) -> int:
    """Parameters that a rank holds and another replica updates; none where weights stay cut."""
    if not job.cuts_optimizer(role) or job.zero(role) == 3:
        return 0
    whole = rank_parameters(trained_spec(job, role), job.degrees(role), *trained_parts(job, role))
    return whole - updated_parameters(job, role)


def shares_tower(job: Job, role: str) -> bool:
    """Whether a role sees through the policy's frozen tower: of the same weights, and neither is trained."""
    if job.spec.vision is None or trains_vision(job, job.policy) or role == job.policy:
        return False
    return job.roles[role].model is None and not trains_vision(job, role)
