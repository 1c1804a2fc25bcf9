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
    """A model call of the split graph; `whole` when it is not split, `early` when nothing of it needs a response.

    `boundaries` are what a suffix goes on from, piece by piece, and a prefix after the first turn extends.
    """

    node: str
    role: str
    op: CallKind
    trained: bool
    boundaries: tuple[str, ...] = ()
    early: bool = False
    turn: int = 1


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
    before = next((g.pieces(i) for i in node.all_input_nodes if g.is_op(i, ops.prefix)), ())
    return Call(node.name, role, op, role in trained, tuple(p.name for p in before), early, g.turn(node))


def in_order(graph: fx.Graph, calls: Iterable[Call]) -> list[Call]:
    """Scoring and training calls behind all that their scores and losses are made of; frozen roles first.

    The calls of a role, one a turn, stay together. Raises GraphError where two losses wait for each other's forward.
    """
    found = {c.node: c for c in calls if c.op in SCORING}
    dag = nx.DiGraph()
    for call in found.values():
        dag.add_node(call.role)
        behind = {n.name for root in roots(graph, call) for n in g.ancestors(root)}
        dag.add_edges_from((c.role, call.role) for c in found.values() if c.node in behind and c.role != call.role)
    place = {c.role: (c.trained, i) for i, c in reversed(list(enumerate(found.values())))}
    try:
        order = list(nx.lexicographical_topological_sort(dag, key=place.__getitem__))
    except nx.NetworkXUnfeasible:
        raise _circle(graph, [a for a, _ in nx.find_cycle(dag)]) from None
    return sorted(found.values(), key=lambda c: (order.index(c.role), c.turn))


def _circle(graph: fx.Graph, roles: list[str]) -> GraphError:
    names = [f"`{r}`" for r in roles]
    return GraphError(
        f"the losses of {' and '.join(sorted(names))} each need the other's forward: neither can be first",
        where=g.loc(g.updates(graph)[roles[0]]),
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
    found = {c.node: _nearest(roots(graph, c), made, _own(c, calls)) for c in calls if c.op != "update"}
    return found | {h: _nearest([g.node_named(graph, h)], made, {h}) for h in hosts}


def _own(call: Call, calls: list[Call]) -> set[str]:
    """What a call's task makes itself: a trained role's loss is made of its forwards of all turns."""
    trains = call.trained and call.op in SCORING
    return {c.node for c in calls if trains and c.role == call.role and c.op in SCORING} | {call.node}


def _nearest(start: list[fx.Node], made: list[str], own: set[str]) -> tuple[str, ...]:
    """The nearest nodes behind these that others make."""
    found, seen, queue = set[str](), set(start), list(start)
    while queue:
        for node in queue.pop().all_input_nodes:
            if node.name in made and node.name not in own:
                found.add(node.name)
            elif node not in seen:
                seen.add(node)
                queue.append(node)
    return tuple(n for n in made if n in found)


# ---- what no schedule can arrange


def check_calls(graph: fx.Graph, calls: list[Call], trains: Iterable[str]) -> None:
    """One rollout a turn, of a role that is trained; a role once a turn; what the job trains is updated."""
    for check in (_one_rollout, _once_a_role, _own_turn, _host_arguments):
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
    """One, or one a turn: the later ones sample from what rx.observe makes of the turn before."""
    found = [c for c in calls if c.op == "generate"]
    again = [c for i, c in enumerate(found) if c.turn != i + 1]
    if not found or again:
        where = g.loc(g.node_named(graph, again[0].node)) if again else ""
        what = f"an iteration has exactly one `generate`, this one has {len(found)}"
        if any(c.turn > 1 for c in found):
            what = f"a turn has exactly one `generate`, turn {again[0].turn} has another"
        raise GraphError(
            what,
            where=where,
            hint="for a second turn sample from rx.observe(environment)(prompts, rollout)",
        )


def _once_a_role(graph: fx.Graph, calls: list[Call]) -> None:
    seen: set[tuple[str, str, int]] = set()
    turns = max(c.turn for c in calls)
    for call in calls:
        op = "suffix" if call.op == "whole" else call.op
        if (op, call.role, call.turn) in seen:
            raise GraphError(
                f"`{call.role}` has a second `{op}` call{f' in turn {call.turn}' if turns > 1 else ''}",
                where=g.loc(g.node_named(graph, call.node)),
                hint="score each role once a step" if turns == 1 else "score each role once a turn",
            )
        seen.add((op, call.role, call.turn))


def _own_turn(graph: fx.Graph, calls: list[Call]) -> None:
    """In an iteration of several turns a model reads the responses of a turn behind that turn's own history."""
    sampled = {g.node_named(graph, c.node).args[1]: c for c in calls if c.op == "generate"}
    if len(sampled) == 1:
        return
    for call in calls:
        node = g.node_named(graph, call.node)
        if call.op == "whole":
            what = f"`{node.name}` is not split, and turns go on from a boundary"
            raise GraphError(
                what, where=g.loc(node), hint="score a turn's own history: role.logprobs(history, rollout)"
            )
        if call.op == "prefix" and call.turn > len(sampled):
            what = f"`{node.args[1]}` is a history that nobody samples from"
            raise GraphError(what, where=g.loc(node), hint="leave it to host functions, or sample another turn")
        if call.op == "suffix" and _history(node) is not _history(node.args[2]):  # type: ignore[arg-type]
            what = f"`{node.name}` reads `{node.args[2]}` behind `{_history(node)}`, which it was not sampled from"
            raise GraphError(what, where=g.loc(node), hint="score each turn with its own history and responses")


def _history(node: fx.Node) -> fx.Node:
    """The prompts that responses were sampled from, or that a suffix's boundary was made of."""
    source = node.args[1]
    assert isinstance(source, fx.Node)
    return _history(source) if g.is_op(source, ops.prefix) else source


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
