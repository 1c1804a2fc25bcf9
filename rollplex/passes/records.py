"""The graph as data for a plan: what a worker needs to evaluate the loss without the user's code."""

from __future__ import annotations

from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.loss import split_loss
from rollplex.ir.module import Module
from rollplex.ir.plan import LossPlan, NodeRecord
from rollplex.ir.records import to_records
from rollplex.passes.schedule import Schedule


def graph_records(module: Module) -> tuple[NodeRecord, ...]:
    """Every node with its phase."""
    return tuple(to_records(module.graph, module[Schedule].phases))


def loss_plans(module: Module) -> dict[str, LossPlan]:
    """The loss of every trained role by prompt group, the policy's first."""
    return {role: split_loss(module.graph, role) for role in reversed(module[Schedule].trained)}


def host_names(module: Module) -> dict[str, str]:
    """Host nodes and the algorithm's parameter each calls."""
    return {n.name: str(n.args[0]) for n in g.find(module.graph, ops.host)}
