"""Questions about an algorithm's graph: where a node comes from, what depends on the response, on theta, on autograd.

A graph is a plain torch.fx graph: placeholders, `call_function` of rollplex.ir.ops or torch, `call_method` of Tensor.
Every node carries meta["loc"] (the user's line), meta["label"] (the user's name for it, or None) and, after
infer-types, meta["type"].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, Node

from rollplex.ir import ops
from rollplex.ir.errors import GraphError, Loc, Problem
from rollplex.ir.ops import OP_OF, Op
from rollplex.ir.torch_ops import TORCH_OPS, TorchOp, instead_of, torch_op_name
from rollplex.ir.types import Type


def loc(node: Node) -> Loc:
    """The user's line that made this node."""
    return node.meta["loc"]


def op_of(node: Node) -> Op | None:
    """The row of a Rollplex op; None for a torch op or a placeholder."""
    return OP_OF.get(node.target) if node.op == "call_function" and callable(node.target) else None


def torch_op_of(node: Node) -> TorchOp | None:
    """The row of a torch op; None for a Rollplex op or a placeholder."""
    name = torch_op_name(node.op, node.target) if node.op in ("call_function", "call_method") else None
    return TORCH_OPS[name] if name else None


def record_name(node: Node) -> str:
    """The name of a node's op in a plan: `rx.generate`, `torch.exp`, `Tensor.clamp`, `input` for a placeholder."""
    if node.op == "placeholder":
        return "input"
    row = op_of(node) or torch_op_of(node)
    assert row is not None, f"{node.format_node()} is not in the tables of ops"
    return row.name


def op_name(node: Node) -> str:
    """The short name of a node's op: `generate`, `torch.exp`, `Tensor.clamp`, `input`, `output`."""
    return node.op if node.op == "output" else record_name(node).removeprefix("rx.")


def is_op(node: Node, *fns: Callable[..., Any]) -> bool:
    """Whether a node records one of these functions of rollplex.ir.ops."""
    return node.op == "call_function" and node.target in fns


def runs_model(node: Node) -> bool:
    """Whether a node is a forward of a model: generate, logprobs, prefix or suffix."""
    row = op_of(node)
    return row is not None and row.calls_model


def is_model_call(node: Node) -> bool:
    """Whether a node is an op of a role: one that runs its model, or its update."""
    return runs_model(node) or is_op(node, ops.update)


def calls(node: Node) -> bool:
    """Whether a node is a model's call on responses, whole or only its suffix: what a window scores or trains."""
    return is_op(node, ops.suffix, *ops.MODEL_CALLS.values())


def head(node: Node) -> str:
    """What a model's call on responses gives: logprobs, values or score; "" for any other node."""
    if not calls(node):
        return ""
    return str(bound_arguments(node)["head"]) if is_op(node, ops.suffix) else op_name(node)


def observed(node: Node) -> bool:
    """Whether a node is a history: what an environment makes of a turn, the prompts of the next."""
    return is_op(node, ops.host) and bound_arguments(node)["returns"] == ops.HISTORY


def turn(node: Node) -> int:
    """The turn that prompts are for, or that a model's call works on: 1, and one more for each observation behind."""
    if observed(node):
        return 1 + turn(node.args[1])  # type: ignore[arg-type]
    return turn(node.args[1]) if runs_model(node) else 1  # type: ignore[arg-type]


def pieces(boundary: Node) -> tuple[Node, ...]:
    """A boundary with all that it extends, the first turn's piece first."""
    before = bound_arguments(boundary)["extends"]
    return (*(pieces(before) if before is not None else ()), boundary)


def role(node: Node) -> str:
    """The role whose model a node runs or updates; "" for any other node."""
    return str(node.args[0]) if is_model_call(node) else ""


def type_of(node: Node) -> Type:
    """The type that infer-types gave a node."""
    return node.meta["type"]


def find(graph: Graph, *fns: Callable[..., Any]) -> tuple[Node, ...]:
    """The nodes that record one of these functions, in order."""
    return tuple(n for n in graph.nodes if is_op(n, *fns))


def node_named(graph: Graph, name: str) -> Node:
    """The node of this name; the name must exist (our own bug otherwise)."""
    return next(n for n in graph.nodes if n.name == name)


def updates(graph: Graph) -> dict[str, Node]:
    """The update of every trained role."""
    return {str(n.args[0]): n for n in find(graph, ops.update)}


def differentiable(node: Node) -> bool:
    """Whether a gradient goes through a node to its inputs."""
    row = op_of(node) or torch_op_of(node)
    return row is not None and row.differentiable


def response_dependent(graph: Graph) -> frozenset[Node]:
    """Nodes that cannot run before the response exists: reachable from a generate op through any op whatever."""
    return _reach(graph, lambda n: is_op(n, ops.generate), lambda n: True)


def ancestors(node: Node) -> frozenset[Node]:
    """A node and all that it is made of."""
    found, queue = {node}, [node]
    while queue:
        for parent in queue.pop().all_input_nodes:
            if parent not in found:
                found.add(parent)
                queue.append(parent)
    return frozenset(found)


def attached(graph: Graph, trained: str | None = None) -> frozenset[Node]:
    """Nodes through which a gradient flows back into a trained role's model (any role, if none is named)."""
    names = {trained} if trained is not None else set(updates(graph))
    return _reach(graph, lambda n: runs_model(n) and role(n) in names and differentiable(n), differentiable)


def _reach(graph: Graph, source: Callable[[Node], bool], through: Callable[[Node], bool]) -> frozenset[Node]:
    """Sources, and what they reach through nodes that let it pass; one walk, since nodes are in topological order."""
    reached: set[Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        if source(node) or (through(node) and any(i in reached for i in node.all_input_nodes)):
            reached.add(node)
    return frozenset(reached)


def copy_graph(graph: Graph) -> Graph:
    """A copy that a pass may rewrite: same names, same meta, no node shared."""
    return rebuild(graph, {})


def rebuild(graph: Graph, names: Mapping[Node, str]) -> Graph:
    """A copy of a graph in which some nodes have another name."""
    new, twin = Graph(), {}
    for node in graph.nodes:
        args, kwargs = map_nodes((node.args, node.kwargs), twin)
        twin[node] = new.create_node(node.op, node.target, args, kwargs, name=names.get(node, node.name))
        twin[node].meta = dict(node.meta)
    return new


def map_nodes(value: Any, twin: Mapping[Node, Any]) -> Any:
    """Arguments with every node replaced by its twin; nodes without one stay."""
    match value:
        case Node():
            return twin.get(value, value)
        case slice():
            return slice(*(map_nodes(v, twin) for v in (value.start, value.stop, value.step)))
        case tuple() | list():
            return tuple(map_nodes(v, twin) for v in value)
        case dict():
            return {k: map_nodes(v, twin) for k, v in value.items()}
        case _:
            return value


def bound_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a Rollplex op by parameter name, defaults included."""
    row = op_of(node)
    assert row is not None
    bound = row.signature.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def verify(graph: Graph) -> None:
    """Check a graph between passes: fx's rules, ops from the tables, lines on all nodes, prefixes that can run early.

    Raises GraphError with every problem found.
    """
    graph.lint()
    late = response_dependent(graph)
    problems = [p for node in graph.nodes if node.op != "output" for p in _problems(node, late)]
    if problems:
        raise GraphError(*problems)


def _problems(node: Node, late: frozenset[Node]) -> list[Problem]:
    where = str(node.meta.get("loc", node.name))
    found = []
    if "loc" not in node.meta:
        found.append(Problem(f"%{node.name} has no line of the user's file", where))
    if node.op != "placeholder" and not (op_of(node) or torch_op_of(node)):
        name = getattr(node.target, "__name__", str(node.target))
        found.append(Problem(f"%{node.name} = {name} is not an op of an algorithm", where, instead_of(name)))
    if is_op(node, ops.prefix) and node in late and not observed(node.args[1]):  # type: ignore[arg-type]
        found.append(Problem(f"%{node.name} is a prefix of a value that depends on the response", where))
    if is_op(node, ops.suffix) and node.args[2] in ancestors(node.args[1]):  # type: ignore[arg-type]
        found.append(Problem(f"%{node.name} goes on from a boundary that its own responses are part of", where))
    return found
