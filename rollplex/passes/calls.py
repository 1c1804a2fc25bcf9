"""The model calls of a split graph in an order that keeps their dependences, and the values each is made of.

reference.suffix, critic.suffix -> its loss      critic's values are in the advantage:  critic  before  actor
actor.suffix -> advantage(values) -> its loss    the references of both:                frozen  before  trained
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import networkx as nx
import torch.fx as fx

from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.errors import GraphError

CallKind = Literal["generate", "prefix", "suffix", "whole", "update"]
SCORING: tuple[CallKind, ...] = ("suffix", "whole")


@dataclass(frozen=True)
class Call:
    """A model call of the split graph; `whole` when it is not split, `early` when nothing of it needs a response."""

    node: str
    role: str
    op: CallKind
    trained: bool
    boundary: str = ""
    early: bool = False


def model_calls(graph: fx.Graph) -> list[Call]:
    """Model calls of a split graph in an order that keeps its dependences (ties by the program's order)."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    dag = nx.DiGraph((i, n) for n in graph.nodes for i in n.all_input_nodes)
    dag.add_nodes_from(graph.nodes)
    late, trained = g.response_dependent(graph), set(g.updates(graph))
    nodes = nx.lexicographical_topological_sort(dag, key=order.__getitem__)
    return [_call(n, trained, n not in late) for n in nodes if g.is_model_call(n)]


def _call(node: fx.Node, trained: set[str], early: bool) -> Call:
    name, role = g.op_name(node), g.role(node)
    op: CallKind = "whole" if name in ops.MODEL_CALLS else name  # type: ignore[assignment]
    boundary = next((i.name for i in node.all_input_nodes if g.is_op(i, ops.prefix)), "")
    return Call(node.name, role, op, role in trained, boundary, early)


def in_order(graph: fx.Graph, calls: Iterable[Call]) -> list[Call]:
    """Scoring and training calls behind all that their scores and losses are made of; frozen roles first.

    Raises GraphError where two losses wait for each other's forward.
    """
    found = {c.node: c for c in calls if c.op in SCORING}
    dag = nx.DiGraph()
    for call in found.values():
        dag.add_node(call.node)
        behind = {n.name for root in roots(graph, call) for n in g.ancestors(root)}
        dag.add_edges_from((name, call.node) for name in found if name in behind and name != call.node)
    place = {name: (found[name].trained, i) for i, name in enumerate(found)}
    try:
        return [found[name] for name in nx.lexicographical_topological_sort(dag, key=place.__getitem__)]
    except nx.NetworkXUnfeasible:
        raise _circle(graph, [found[a] for a, _ in nx.find_cycle(dag)]) from None


def _circle(graph: fx.Graph, calls: list[Call]) -> GraphError:
    names = [f"`{c.role}`" for c in calls]
    return GraphError(
        f"the losses of {' and '.join(sorted(names))} each need the other's forward: neither can be first",
        where=g.loc(g.updates(graph)[calls[0].role]),
        hint="take what is known before the update from the rollout: rollout.logprobs instead of actor.logprobs(..)",
    )


def roots(graph: fx.Graph, call: Call) -> list[fx.Node]:
    """What a call's window computes: its value and, of a trained role, the loss."""
    node = g.node_named(graph, call.node)
    return [node, g.updates(graph)[call.role]] if call.trained and call.op in SCORING else [node]


def inputs_of(graph: fx.Graph, calls: list[Call]) -> dict[str, tuple[str, ...]]:
    """By node, the values made elsewhere that a call or a host function is made of, in the order they become known."""
    hosts = [n.name for n in g.find(graph, ops.host)]
    made = [n.name for n in graph.nodes if n.op == "placeholder"]
    made += [c.node for c in calls if c.op == "generate"]
    made += [c.node for c in in_order(graph, calls)] + hosts
    found = {c.node: _nearest(roots(graph, c), made, c.node) for c in calls if c.op != "update"}
    return found | {h: _nearest([g.node_named(graph, h)], made, h) for h in hosts}


def _nearest(start: list[fx.Node], made: list[str], own: str) -> tuple[str, ...]:
    """The nearest nodes behind these that others make."""
    found, seen, queue = set[str](), set(start), list(start)
    while queue:
        for node in queue.pop().all_input_nodes:
            if node.name in made and node.name != own:
                found.add(node.name)
            elif node not in seen:
                seen.add(node)
                queue.append(node)
    return tuple(n for n in made if n in found)


# ---- what no schedule can arrange


def check_calls(graph: fx.Graph, calls: list[Call], trains: Iterable[str]) -> None:
    """One rollout, of a role that is trained; one prefix and one suffix a role; what the job trains is updated."""
    for check in (_one_rollout, _once_a_role, _host_arguments):
        check(graph, calls)
    updated = {c.role for c in calls if c.op == "update"}
    for role in (r for r in trains if r not in updated):
        node = next(g.node_named(graph, c.node) for c in calls if c.role == role)
        raise GraphError(
            f"`{role}` is never updated, and the job has roles.{role}.train",
            where=g.loc(node),
            hint=f"end with {role}.update(loss), or give the role `score` instead",
        )


def _one_rollout(graph: fx.Graph, calls: list[Call]) -> None:
    found = [c for c in calls if c.op == "generate"]
    if len(found) != 1:
        where = g.loc(g.node_named(graph, found[1].node)) if found else ""
        raise GraphError(f"an iteration has exactly one `generate`, this one has {len(found)}", where=where)


def _once_a_role(graph: fx.Graph, calls: list[Call]) -> None:
    seen: set[tuple[str, str]] = set()
    for call in calls:
        op = "suffix" if call.op == "whole" else call.op
        if (op, call.role) in seen:
            raise GraphError(
                f"`{call.role}` has a second `{op}` call",
                where=g.loc(g.node_named(graph, call.node)),
                hint="score each role once a step",
            )
        seen.add((op, call.role))


def _host_arguments(graph: fx.Graph, calls: list[Call]) -> None:
    scored = {c.node for c in calls if c.op in ("suffix", "whole", "prefix")}
    for node in g.find(graph, ops.host):
        taken = next((n.name for n in g.ancestors(node) if n.name in scored), None)
        if taken:
            raise GraphError(
                f"host function `{node.args[0]}` takes `{taken}`, which a model makes",
                where=g.loc(node),
                hint="a host function takes prompts, rollouts and what other host functions return",
            )
