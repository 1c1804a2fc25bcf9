"""Host memory of a node: what its pinned pools, its processes and a step's batch take of it, on the fullest node.

    first node, 8 GPUs   pools 8 x 59.0   processes 17 x 1.3   batch 2.3 at the controller, 8 x 2.3 at its ranks
    any other            pools 8 x 59.0   processes 16 x 1.3   batch 8 x 2.3

The batch is cut over the data-parallel replicas of the policy; every rank of a replica has its replica's part. On the
host backend `host_memory_gb` is a budget of the pool alone: there, a GPU's memory is memory of the same machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollplex.ir.hardware import PROCESS_HOST_MIB
from rollplex.ir.job import Job
from rollplex.ir.plan import PlannedObject
from rollplex.ir.planned_node import BATCH, PROCESSES, NodeMemory
from rollplex.ir.planned_pool import HostPool
from rollplex.ir.sizes import gib_to_nbytes
from rollplex.passes.payload import batch_bytes

ENGINES = ("train", "rollout")


@dataclass(frozen=True)
class Node:
    """GPUs of a node by pool; the controller is on the first."""

    gpus: dict[str, int]
    controller: bool


def nodes(job: Job) -> Iterator[Node]:
    """Every kind of node once: the GPUs of a rollout pool are the last of the cluster."""
    per_node, first, seen = job.cluster.gpus_per_node, job.pool("train"), list[Node]()
    for i in range(job.cluster.nodes):
        trains = min(max(job.train_gpus - i * per_node, 0), per_node)
        gpus = {pool: trains if pool == first else per_node - trains for pool in job.pools}
        node = Node({pool: count for pool, count in gpus.items() if count}, controller=i == 0)
        if node not in seen:
            seen.append(node)
            yield node


def process_bytes(job: Job, node: Node) -> int:
    """Of the engine processes of its GPUs, and of the controller."""
    stated = job.cluster.process_host_gib
    each = (0 if job.on_host else PROCESS_HOST_MIB * 2**20) if stated is None else gib_to_nbytes(stated)
    engines = sum(count for pool, count in node.gpus.items() for e in ENGINES if job.pool(e) == pool)
    return each * (engines + node.controller)


def batch_bytes_of(job: Job, node: Node) -> int:
    """Of the training ranks, each with its replica's part of the batch, and of the controller."""
    if job.on_host:
        return 0
    batch, ranks = batch_bytes(job), node.gpus.get(job.pool("train"), 0)
    return ranks * -(-batch // job.data_parallel(job.policy)) + (batch if node.controller else 0)


def node_memory(job: Job, pool: HostPool) -> NodeMemory:
    """The fullest node under a pinned pool of these places."""
    sizes = dict.fromkeys(job.pools, 0)
    for p in pool.offsets:
        sizes[p.pool] = max(sizes[p.pool], p.offset + p.bytes)
    found = (_memory(job, node, sizes) for node in nodes(job))
    return max(found, key=lambda n: n.total_bytes)


def _memory(job: Job, node: Node, sizes: Mapping[str, int]) -> NodeMemory:
    return NodeMemory(
        gpus=node.gpus,
        controller=node.controller,
        capacity_bytes=job.host_memory_bytes,
        pinned_bytes=sum(count * sizes[pool] for pool, count in node.gpus.items()),
        process_bytes=process_bytes(job, node),
        batch_bytes=batch_bytes_of(job, node),
    )


def kept(job: Job, memory: NodeMemory, objects: Sequence[PlannedObject], window: str) -> dict[str, int]:
    """Bytes on the node by object in a window, over all of its GPUs, with the processes and the batch."""
    there = (o for o in objects if o.host_backed or o.residency[window] == "host")
    pinned = {o.name: o.bytes * memory.gpus.get(job.pool(o.process), 0) for o in there}
    found = {**pinned, PROCESSES: memory.process_bytes, BATCH: memory.batch_bytes}
    return {name: nbytes for name, nbytes in found.items() if nbytes}
