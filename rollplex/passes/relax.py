"""What fits, without a plan: a bound on sizes that needs no solver, and the placements of residency.py without times.

Data        b[o], C, H, F[o,w]   as in residency.py          B[p]   bytes of p that the pinned pool always backs
            N, D     host memory of a node, what its processes and a step's batch take of it (fullest node)
Relaxed     (3), (6) to (9) and (14) are dropped: every object is free to be in another place in every window
Constraints (R1)  f[p,w] = max_m sum_{o in p: F[o,w] = {hbm}} b[o,m] <= C         what must be in HBM fits
            (R2)  f[p,w] + sum_{o in p: may be at the host, never dropped} b[o,m] <= C + H - B[p]
                                                                           what must be somewhere fits
            (R3)  D + (B of every GPU of the node) <= N
Result      lack[w]   most bytes of a pool by which (R1) or (R2) fails, lack[node] (R3). A job with any is infeasible,
                      others may be.
            has_room  whether (1) to (5) and (14) have a solution with over = short = 0: what residency can place
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollplex.ir.module import Module
from rollplex.passes.node_memory import Node, batch_bytes_of, nodes, process_bytes
from rollplex.passes.releasing import choices
from rollplex.passes.residency import FAMILIES, Model
from rollplex.passes.residency_data import UNIT, Data, Item, gather
from rollplex.passes.solver import constrain, satisfiable
from rollplex.passes.state import Lifetimes

ONLY_HBM = frozenset({"hbm"})
PLACING = tuple(family for family in FAMILIES if family.number in (1, 2, 3, 4, 5, 14))


def lack(module: Module) -> dict[str, int]:
    """lack[w] in bytes for every window that has some; empty when the relaxed problem is feasible."""
    data = _roomiest(module)
    found = {w: UNIT * max(_lack_in(data, p, w) for p in data.pools) for w in data.windows}
    found["node"] = max(_lack_of(module, node) for node in nodes(module.job))
    return {w: nbytes for w, nbytes in found.items() if nbytes > 0}


def _roomiest(module: Module) -> Data:
    """Of what the job leaves to residency: a snapshot that is released takes no more anywhere."""
    return gather(module, choices(module.job)[-1])


def _lack_of(module: Module, node: Node) -> int:
    """(R3) of one node; frozen weights alone are sure to be in its pools."""
    job = module.job
    backed = sum(o.nbytes * node.gpus.get(job.pool(o.process), 0) for o in module[Lifetimes].objects if o.host_backed)
    return process_bytes(job, node) + batch_bytes_of(job, node) + backed - job.host_memory_bytes


def _lack_in(data: Data, pool: str, window: str) -> int:
    mine = [o for o in data.items if o.pool == pool]
    here = [o for o in mine if window in o.places]
    needed = [o for o in here if o.places[window] == ONLY_HBM]
    movable = [
        o for o in here if o.places[window] != ONLY_HBM and not o.host_backed and "dropped" not in o.places[window]
    ]
    both = data.capacity + data.host_capacity - _units((o for o in mine if o.host_backed), {})
    lacks = []
    for then in data.moments_of(window):
        forced = _units(needed, then)
        lacks.append(max(forced - data.capacity, forced + _units(movable, then) - both))
    return max(lacks)


def _units(items: Iterable[Item], then: Mapping[str, int]) -> int:
    """At a moment of the window."""
    return sum(then.get(o.name, o.units) for o in items)


def has_room(module: Module) -> bool:
    """Whether every object has a legal place in every window under both capacities. SolverTimeout: nobody knows."""
    model, limits = constrain(Model(_roomiest(module)), PLACING), module.job.solver
    for lacking in (*model.over.values(), *model.short.values()):
        model.cp.add(lacking == 0)
    return satisfiable(model.cp, "residency", seconds=limits.seconds, seed=limits.seed)
