"""Names of the finished graph: the user's variables keep theirs, temporaries are called after their op.

x = logp * 2; x = x + 1        %x, %x_1
rollout.mask                   %rollout_mask
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from rollplex.ir import graph as graphs
from rollplex.ir import ops


def named_graph(graph: Graph) -> Graph:
    """The finished graph: nodes take the user's names first, temporaries keep fx's as far as those are free."""
    names: dict[Node, str] = {}
    taken: set[str] = set()
    for labelled in (True, False):
        for node in graph.nodes:
            if (node.meta.get("label") is not None) is labelled:
                names[node] = _unique(node.meta.get("label") or _temporary(node), taken)
    return graphs.rebuild(graph, names)


def _temporary(node: Node) -> str:
    if graphs.is_op(node, ops.field):
        return f"{node.args[0].meta['label'] or node.args[0].name}_{node.args[1]}"  # type: ignore[union-attr]
    if graphs.is_op(node, ops.update):
        return f"update_{node.args[0]}"
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "value")
    return "index" if node.target is operator.getitem else target.strip("_")


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken.add(candidate)
    return candidate
