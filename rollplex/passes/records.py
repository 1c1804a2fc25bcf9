"""The graph as data for a plan: what a worker needs to evaluate the loss without the user's code."""

from __future__ import annotations

from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.module import Module
from rollplex.ir.plan import NodeRecord
from rollplex.ir.serialise import to_records
from rollplex.passes.schedule import Schedule


def graph_records(module: Module) -> tuple[NodeRecord, ...]:
    """Every node with its phase."""
    phases = module[Schedule].phases
    return tuple(r.model_copy(update={"phase": phases.get(r.name, "")}) for r in to_records(module.graph))


def host_names(module: Module) -> dict[str, str]:
    """Host nodes and the algorithm's parameter each calls."""
    return {n.name: str(n.args[0]) for n in g.find(module.graph, ops.host)}
