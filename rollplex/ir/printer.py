"""Print a graph as the program the user wrote.

ratio = torch.exp(logp - rollout.logprobs)                                               # grpo.py:19

Values with the user's names are statements; temporaries that are used once stand where they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.params import (
    ATOM,
    BINARY_SYMBOLS,
    COMPARE,
    OR,
    UNARY,
    UNARY_SYMBOLS,
    level_of,
    operand_levels,
    written,
)

# A comparison never stands bare in a comparison: Python would chain them.
_COMPARED = (OR, OR)


@dataclass(frozen=True)
class _Text:
    """An expression and how tightly it binds."""

    text: str
    level: int = ATOM

    def within(self, level: int) -> str:
        """The expression as an operand at this level."""
        return f"({self.text})" if self.level < level else self.text


class _Python:
    """Expressions as the user writes them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.uses = {n: _occurrences(n) for n in graph.nodes}

    def is_statement(self, node: Node) -> bool:
        """Whether a node has a line of its own."""
        if node.op in ("placeholder", "output") or node.meta.get("implicit"):
            return False
        if g.is_op(node, ops.update) or node.meta.get("label") is not None:
            return True
        return not g.is_op(node, ops.field) and self._count(node) != 1

    def _count(self, node: Node) -> int:
        """Places where a node is read; the unsqueezes of broadcasting by name are not seen."""
        return sum(self._count(u) if u.meta.get("implicit") else self.uses[node][u] for u in node.users)

    def operand(self, value: Any) -> _Text:
        """An argument: a name, the expression of an inlined temporary, or a literal."""
        match value:
            case Node() if value.meta.get("implicit"):
                return self.operand(value.args[0])
            case Node() if value.op == "placeholder" or self.is_statement(value):
                return _Text(value.name)
            case Node():
                return self.expression(value)
            case tuple() | list():
                inner = ", ".join(self.operand(v).text for v in value)
                return _Text(f"({inner},)" if len(value) == 1 else f"({inner})")
            case torch.dtype():
                return _Text(str(value))
            case _ if value is ...:
                return _Text("...")
            case _:
                return _Text(written(value), level_of(value))

    def expression(self, node: Node) -> _Text:
        """What stands right of a node's `=`."""
        name = g.record_name(node)
        if name.startswith("operator."):
            return self._operator(name.removeprefix("operator."), node)
        if name.startswith("Tensor."):
            receiver = self.operand(node.args[0]).within(ATOM)
            return _Text(f"{receiver}.{node.target}({self._arguments(node.args[1:], node.kwargs)})")
        if name.startswith("torch."):
            return _Text(f"{name}({self._arguments(node.args, node.kwargs)})")
        return _Text(self.op(node))

    def op(self, node: Node) -> str:
        """A Rollplex op: a method of a role, a field, a host call, or a function of rx."""
        bound, name = g.bound_arguments(node), g.op_name(node)
        if g.is_op(node, ops.field):
            return f"{self.operand(bound['value']).within(ATOM)}.{bound['name']}"
        if g.is_op(node, ops.host):
            returns = "" if bound["returns"] == "scores" else f", returns={bound['returns']!r}"
            return f"rx.host({_address(bound['fn'])}{returns})({self._arguments(bound['args'], {})})"
        if g.is_model_call(node):
            return f"{bound['role']}.{name}({self._arguments(node.args[1:], node.kwargs)})"
        return f"rx.{name}({self._arguments(node.args, _given(node))})"

    def _operator(self, name: str, node: Node) -> _Text:
        if name == "getitem":
            return _Text(f"{self.operand(node.args[0]).within(ATOM)}[{self._index(node.args[1])}]")
        if name == "abs":
            return _Text(f"abs({self.operand(node.args[0]).text})")
        if name in UNARY_SYMBOLS:
            return _Text(UNARY_SYMBOLS[name] + self.operand(node.args[0]).within(UNARY), UNARY)
        symbol, level = BINARY_SYMBOLS[name]
        left, right = _COMPARED if level == COMPARE else operand_levels(level)
        operands = self.operand(node.args[0]).within(left), self.operand(node.args[1]).within(right)
        return _Text(f"{operands[0]} {symbol} {operands[1]}", level)

    def _index(self, index: Any) -> str:
        if isinstance(index, tuple):
            return ", ".join(self._index(i) for i in index) + ("," if len(index) == 1 else "")
        if isinstance(index, slice):
            parts = ["" if v is None else self.operand(v).text for v in (index.start, index.stop)]
            return ":".join(parts) + ("" if index.step is None else f":{self.operand(index.step).text}")
        return self.operand(index).text

    def _arguments(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
        shown = [self.operand(a).text for a in args]
        return ", ".join([*shown, *(f"{k}={self.operand(v).text}" for k, v in kwargs.items())])


def _given(node: Node) -> dict[str, Any]:
    """Keyword arguments that are not at their defaults."""
    row = g.op_of(node)
    assert row is not None
    return {k: v for k, v in node.kwargs.items() if v != row.signature.parameters[k].default}


def _address(fn: str) -> str:
    """`reward`, or `module.function` of the address `module:function`."""
    return fn.replace(":", ".")


def _occurrences(node: Node) -> dict[Node, int]:
    """How often each user reads a node: x * x reads x twice."""
    return {user: _count_in((user.args, user.kwargs), node) for user in node.users}


def _count_in(value: Any, node: Node) -> int:
    match value:
        case Node():
            return int(value is node)
        case tuple() | list():
            return sum(_count_in(v, node) for v in value)
        case dict():
            return sum(_count_in(v, node) for v in value.values())
        case slice():
            return sum(_count_in(v, node) for v in (value.start, value.stop, value.step))
        case _:
            return 0


def body_lines(graph: Graph) -> list[tuple[str, Node]]:
    """The statements of an algorithm, each with the node it makes."""
    style = _Python(graph)
    lines = []
    for node in graph.nodes:
        if style.is_statement(node):
            text = style.expression(node).text
            lines.append((text if g.is_op(node, ops.update) else f"{node.name} = {text}", node))
    return lines


def print_graph(graph: Graph, header: bool = True) -> str:
    """The program of a graph, the user's line at the right of each statement; it can be traced again."""
    indent = "    " if header else ""
    lines = [(indent + text, str(g.loc(node))) for text, node in body_lines(graph)]
    if header:
        prompts = next(n for n in graph.nodes if n.op == "placeholder")
        lines = [("@rx.algorithm", ""), (f"def {prompts.meta['header']}:", str(g.loc(prompts))), *lines]
    width = max((len(text) for text, where in lines if where), default=0)
    return "\n".join(f"{text:<{width}}  # {where}" if where else text for text, where in lines) + "\n"
