"""Give every value a type with named dims, and make broadcasting by name explicit.

ratio      float32 [prompt, group, response] attached response      16.0 MiB
advantage  float32 [prompt, group] response                         1.0 KiB

advantage meets ratio: torch.unsqueeze(advantage, -1) is inserted, so that whoever executes the graph needs no names.
The result of a torch op is found by running it on small tensors whose dims have lengths that tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.errors import GraphError
from rollplex.ir.module import Module
from rollplex.ir.params import plain
from rollplex.ir.torch_ops import TorchOp, reduced_dim
from rollplex.ir.types import (
    DIMS,
    PROMPT,
    RESPONSE,
    UNIT,
    StructType,
    TensorType,
    Type,
    float_dtype_of,
    nbytes,
    with_flags,
)

# Lengths of sample tensors: distinct primes, so that a length in a result names its dim.
_LENGTH = dict(zip(DIMS, (2, 3, 5, 7, 11, 13, 17), strict=True)) | {UNIT: 1}
_DIM_OF = {length: dim for dim, length in _LENGTH.items()}


@dataclass(frozen=True)
class Types:
    """The type of every node by name, its bytes in one step, and what a user should know about the maths."""

    made_by: ClassVar[str] = "infer-types"
    types: Mapping[str, Type]
    bytes: Mapping[str, int]
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = max((len(name) for name in self.types), default=0)
        rows = [f"{n:<{width}}  {t!s:<60}{_shown(self.bytes.get(n))}".rstrip() for n, t in self.types.items()]
        return "\n".join([*rows, *(f"warning: {w}" for w in self.warnings)])


def _shown(nbytes: int | None) -> str:
    if nbytes is None:
        return ""
    power = 0 if nbytes < 1024 else 1 if nbytes < 1024**2 else 2 if nbytes < 1024**3 else 3
    return f"{nbytes / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB')[power]}" if power else f"{nbytes} B"


def types_of(graph: Graph, job: Any, warnings: tuple[str, ...] = ()) -> Types:
    """The fact that a typed graph gives."""
    types = {n.name: g.type_of(n) for n in graph.nodes if n.op != "output"}
    sized = {n: t for n, t in types.items() if isinstance(t, TensorType)}
    return Types(MappingProxyType(types), MappingProxyType({n: nbytes(t, job) for n, t in sized.items()}), warnings)


# --------------------------------------------------------------------------------------------- broadcasting by name


def common_dims(operands: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The dims of the widest operand; every other must have a part of them, in the same order. Raises GraphError."""
    widest = max(operands, key=lambda dims: (sum(d != UNIT for d in dims), len(dims)))
    for dims in operands:
        rest = iter(widest)
        if not all(d in rest for d in dims if d != UNIT) or missing_axes(dims, widest) is None:
            raise _unaligned(dims, widest)
    return widest


def _unaligned(dims: tuple[str, ...], widest: tuple[str, ...]) -> GraphError:
    lone = [d for d in dims if d not in widest] or list(dims)
    other = [d for d in widest if d not in dims] or list(widest)
    pair = f"{', '.join(lone)} against {', '.join(other)}"
    return GraphError(
        f"cannot align [{', '.join(dims)}] with [{', '.join(widest)}]: {pair}",
        hint=f"reduce {', '.join(lone)} first, with x.sum(dim) or a masked op",
    )


def missing_axes(dims: tuple[str, ...], common: tuple[str, ...]) -> tuple[int, ...] | None:
    """Where to unsqueeze, one after the other, so that right-aligned broadcasting puts every dim in its place.

    ("prompt", "group") in ("prompt", "group", "response") gives (2,): [prompt, group, 1]. None when dims of length one
    stand where `common` has no place for them.
    """
    axes: list[int] = []
    current, position = list(dims), 0
    for dim in common:
        if position < len(current) and current[position] in (dim, UNIT):
            position += 1
        elif position:  # dims missing at the left end need no unsqueeze
            axes.append(position)
            current.insert(position, UNIT)
            position += 1
    if position < len(current):
        return None
    return tuple(axes) if dims else ()


class _Typing:
    """One walk over a graph: nodes are copied with their types, unsqueezes inserted where dims must be aligned."""

    def __init__(self, graph: Graph, job: Any) -> None:
        self.source, self.job = graph, job
        self.float_dtype = float_dtype_of(job)
        self.trained = set(g.updates(graph))
        self.graph = Graph()
        self.twin: dict[Node, Node] = {}
        self.widened: dict[tuple[Node, tuple[int, ...]], Node] = {}
        self.warnings: list[str] = []

    def run(self) -> Graph:
        """The typed copy."""
        for node in self.source.nodes:
            if node.op == "output":
                self.graph.output(g.map_nodes(node.args[0], self.twin))
                continue
            try:
                self.twin[node] = self._typed(node)
            except GraphError as err:
                if err.problems[0].where:
                    raise
                raise GraphError(err.problems[0].what, where=g.loc(node), hint=err.problems[0].hint) from None
        return self.graph

    def _typed(self, node: Node) -> Node:
        args, kwargs = self._aligned(node)
        new = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        new.meta = dict(node.meta)
        found = self._type(new)
        late = g.is_op(new, ops.generate) or any(_flag(i, "response_dependent") for i in new.all_input_nodes)
        new.meta["type"] = with_flags(found, self._attached(new, found), late)
        self._check(new)
        return new

    def _aligned(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in the new graph; those that broadcast by name get the dims they lack."""
        args, kwargs = g.map_nodes((node.args, node.kwargs), self.twin)
        row, torch_row = g.op_of(node), g.torch_op_of(node)
        if not (row and row.tensors) and not (torch_row and torch_row.kind == "pointwise"):
            return args, kwargs
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Node)]
        dims = [g.type_of(t).dims for t in tensors]  # type: ignore[union-attr]
        if len(dims) < 2:
            return args, kwargs
        common = common_dims(dims)
        wide = {t: self._widen(t, missing_axes(d, common) or (), node) for t, d in zip(tensors, dims, strict=True)}
        return g.map_nodes((args, kwargs), wide)

    def _widen(self, value: Node, axes: tuple[int, ...], user: Node) -> Node:
        if not axes:
            return value
        if (value, axes) not in self.widened:
            wide = value
            for axis in axes:
                wide = self._unsqueeze(wide, axis, f"{value.name}_wide", user)
            self.widened[value, axes] = wide
        return self.widened[value, axes]

    def _unsqueeze(self, value: Node, axis: int, name: str, user: Node) -> Node:
        node = self.graph.create_node("call_function", torch.unsqueeze, (value, axis), {}, name=name)
        found: Any = g.type_of(value)
        dims = (*found.dims[:axis], UNIT, *found.dims[axis:])
        node.meta = {"loc": g.loc(user), "label": None, "implicit": True}
        node.meta["type"] = TensorType(dims, found.dtype, found.attached, found.response_dependent)
        return node

    def _type(self, node: Node) -> Type:
        if node.op == "placeholder":
            return StructType("Prompts", (PROMPT,))
        row, torch_row = g.op_of(node), g.torch_op_of(node)
        if row is not None:
            bound = {k: g.type_of(v) if isinstance(v, Node) else v for k, v in g.bound_arguments(node).items()}
            return row.rule(bound, self.float_dtype)
        assert torch_row is not None, f"{node.format_node()} is in no table"
        found = result_type(node, torch_row)
        self._warn(node, torch_row)
        return found

    def _attached(self, node: Node, found: Type) -> bool:
        """A gradient flows back from the value: it is a trained role's, or made of attached values, and a float."""
        if not g.differentiable(node) or (isinstance(found, TensorType) and "float" not in found.dtype):
            return False
        if g.runs_model(node) and g.role(node) in self.trained:
            return True
        return any(_flag(i, "attached") for i in node.all_input_nodes)

    def _warn(self, node: Node, row: TorchOp) -> None:
        """An average over response positions counts the padding of short responses."""
        if row.name.rsplit(".", 1)[-1] not in ("mean", "std", "var", "nanmean"):
            return
        x: Any = g.type_of(node.args[0])  # type: ignore[arg-type]
        axes = reduced_dim(node.args, node.kwargs)
        dims = x.dims if axes is None else tuple(x.dims[a] for a in axes if -len(x.dims) <= a < len(x.dims))
        if RESPONSE in dims:
            what = f"`{row.name}` over response positions counts padding"
            self.warnings.append(f"{g.loc(node)}: {what}; rx.masked_mean(x, rollout.mask) does not")

    def _check(self, node: Node) -> None:
        """Responses a prompt are the job's, and a loss keeps its gradient to the end."""
        if g.is_op(node, ops.generate) and g.observed(node.args[1]):  # type: ignore[arg-type]
            if (n := plain(g.bound_arguments(node)["n"])) != 1:
                what = f"generate has n={n} on a history: each of its trajectories goes on by itself"
                raise GraphError(what, hint="n=1")
        elif g.is_op(node, ops.generate, ops.group_normalize):
            n, group = plain(g.bound_arguments(node)["n"]), self.job.workload.group
            if n != group:
                raise GraphError(
                    f"{g.op_name(node)} has n={n}, the job samples workload.group={group} responses a prompt",
                    hint=f"set algorithm.n={group}, or workload.group={n}, in the job",
                )
        if g.is_op(node, ops.group_normalize) and plain(g.bound_arguments(node)["n"]) < 2:
            raise GraphError("a group of one response has no deviation to normalise by", hint="n of at least 2")
        if g.is_op(node, ops.update) and not _flag(node.all_input_nodes[0], "attached"):
            raise GraphError(
                "the loss is not a float with a gradient", hint="cast to int or bool only what is detached"
            )


def _flag(node: Node, flag: str) -> bool:
    return bool(getattr(g.type_of(node), flag, False))


def result_type(node: Node, row: TorchOp) -> TensorType:
    """Run a torch op on small tensors: the lengths in the result name its dims; GraphError has torch's reason."""
    args, kwargs = _samples((node.args, node.kwargs))
    try:
        result = row.run(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError) as err:
        given = ", ".join(f"[{', '.join(g.type_of(i).dims)}]" for i in node.all_input_nodes)  # type: ignore[union-attr]
        raise GraphError(
            f"`{row.name}` on {given}: {str(err).splitlines()[0]}", hint="see torch's documentation"
        ) from None
    if not isinstance(result, torch.Tensor):
        raise GraphError(f"`{row.name}` gives {type(result).__name__}, not one tensor", hint="use torch.amax / amin")
    strange = [n for n in result.shape if n not in _DIM_OF]
    if strange:
        raise GraphError(
            f"`{row.name}` changes the length of a dim, so that it has no name any more",
            hint="mask positions instead of slicing them away",
        )
    return TensorType(tuple(_DIM_OF[n] for n in result.shape), str(result.dtype).removeprefix("torch."))


def _samples(value: Any) -> Any:
    """Arguments with every node replaced by a tensor of its type; torch's meta kernels take a second to import."""
    match value:
        case Node():
            found = g.type_of(value)
            if not isinstance(found, TensorType):
                raise GraphError(f"{value.name} is {found}, not a tensor", hint="use one of its fields")
            shape = [_LENGTH[d] for d in found.dims]
            return torch.zeros(shape, dtype=getattr(torch, found.dtype))
        case tuple() | list():
            return tuple(_samples(v) for v in value)
        case dict():
            return {k: _samples(v) for k, v in value.items()}
        case slice():
            return slice(*(plain(v) for v in (value.start, value.stop, value.step)))
        case _:
            return plain(value)


@dataclass(frozen=True)
class InferTypes:
    """Types with named dims for every value; broadcasting by name becomes explicit.

    Job keys: `model.dtype`, `workload`.
    """

    name: ClassVar[str] = "infer-types"
    needs: ClassVar[tuple[type, ...]] = ()
    makes: ClassVar[type] = Types

    def run(self, module: Module) -> Module:
        """The typed graph, and the fact `Types`."""
        walk = _Typing(module.graph, module.job)
        graph = walk.run()
        unused = [n for n in graph.nodes if g.runs_model(n) and not n.users]
        warnings = [f"{g.loc(n)}: `{n.name}` is never used, yet {g.role(n)}'s model runs for it" for n in unused]
        return module.with_graph(graph).put(types_of(graph, module.job, (*walk.warnings, *warnings)))
