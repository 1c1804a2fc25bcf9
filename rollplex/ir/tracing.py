"""Recording an algorithm: traced values stand for tensors, every op on one becomes a node with the user's file:line.

The names of nodes are the user's own: before each op, the variables of the frames that led to it are looked through for
values that have no name yet.
"""

from __future__ import annotations

import difflib
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch.fx import Graph, Node
from torch.fx.proxy import GraphAppendingTracer, Proxy

from rollplex.ir import graph as graphs
from rollplex.ir import ops
from rollplex.ir.errors import GraphError, Loc
from rollplex.ir.torch_ops import TORCH_OPS, instead_of, torch_op_name
from rollplex.ir.types import FIELDS

# Frames of these folders are ours or torch's; the user's line is outside.
_OURS = (str(Path(__file__).resolve().parents[1]), str(Path(torch.__path__[0]).resolve()))

_CONTROL = (
    "a choice between values is torch.where(condition, a, b) or a mask; `if` and `while` may test parameters only"
)
_LENGTH = "lengths are fixed by the job: use the parameter n, rx.group_normalize, or a masked op"
_NUMBER = "keep it as a tensor (torch maths records itself), or make it a parameter of the algorithm"
# Arguments of torch functions that say where or into what, which a plan decides.
_FOREIGN_ARGUMENTS = {"out", "device", "generator", "inplace", "layout", "memory_format"}

_SPELLING = {"axis": "dim", "keepdims": "keepdim", "self": "input"}


class Value(Proxy):
    """A traced tensor, or a struct of them (prompts, a rollout, a boundary)."""

    tracer: Recorder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.tracer.attribute(self, name)

    def __bool__(self) -> bool:
        raise self.tracer.data_error("a decision on", _CONTROL)

    def __iter__(self) -> Iterator[Any]:
        raise self.tracer.data_error("iteration over", _LENGTH)

    def __len__(self) -> int:
        raise self.tracer.data_error("the length of", _LENGTH)

    def __contains__(self, _item: object) -> bool:
        raise self.tracer.data_error("a search in", _CONTROL)

    def __int__(self) -> int:
        raise self.tracer.data_error("a Python number of", _NUMBER)

    def __float__(self) -> float:
        raise self.tracer.data_error("a Python number of", _NUMBER)

    def __index__(self) -> int:
        raise self.tracer.data_error("a Python number of", _NUMBER)

    def __setitem__(self, _key: object, _value: object) -> None:
        raise self.tracer.error(
            "values are never changed in place", "torch.where(condition, a, b), or x.masked_fill(mask, v)"
        )

    def __call__(self, *_args: object, **_kwargs: object) -> Any:
        raise self.tracer.error(f"`{self.tracer.name_of(self)}` is a value, not a function", "drop the call")


class Recorder(GraphAppendingTracer):
    """Appends nodes to a graph and refuses, at the user's line, what cannot be part of one."""

    def __init__(self, code: CodeType) -> None:
        super().__init__(Graph())
        self.code = code
        self.file = code.co_filename
        self.updated: dict[str, Loc] = {}
        self._theta: dict[Node, frozenset[str]] = {}
        self._late: set[Node] = set()
        self._fields: dict[tuple[Node, str], Value] = {}

    # -------------------------------------------------------------------------------------------------- recording

    def input(self, name: str, struct: str, where: Loc) -> Value:
        """The placeholder of the algorithm's prompts."""
        node = self.graph.placeholder(name)
        node.meta = {"loc": where, "label": name, "struct": struct}
        self._theta[node] = frozenset()
        return Value(node, self)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Callable[[Node], Proxy] | None = None,
    ) -> Value:
        """Record one op; torch functions, operators, methods and Rollplex ops all come through here."""
        self._name_values()
        if target in ops.OP_OF:
            self._check_op(ops.OP_OF[target], args, kwargs)
        else:
            args, kwargs = _one_spelling(args, kwargs)
            self._check_torch(kind, target, args, kwargs)
        node_args, node_kwargs = self._argument(args), self._argument(kwargs)
        node = self.graph.create_node(kind, target, node_args, node_kwargs)
        node.meta = {"loc": self.here(), "label": None, "struct": self._struct(node)}
        self._track(node)
        return Value(node, self)

    def record(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        """Record a Rollplex op."""
        return self.create_proxy("call_function", fn, args, kwargs)

    def attribute(self, value: Value, name: str) -> Any:
        """A field of a struct, or a method of a tensor that records itself when called."""
        struct = value.node.meta["struct"]
        if struct is not None:
            return self._field(value, struct, name)
        if f"Tensor.{name}" not in TORCH_OPS:
            self.refuse(f"a traced tensor has no `.{name}`", instead_of(name))
        return lambda *args, **kwargs: self.create_proxy("call_method", name, (value, *args), kwargs)

    def _field(self, value: Value, struct: str, name: str) -> Value:
        if name not in FIELDS[struct]:
            self.refuse(f"{struct} has no `.{name}`", closest(name, FIELDS[struct]))
        if (value.node, name) not in self._fields:
            self._fields[value.node, name] = self.record(ops.field, value, name)
        return self._fields[value.node, name]

    def _struct(self, node: Node) -> str | None:
        row = graphs.op_of(node)
        if row is None:
            return None
        returns = graphs.bound_arguments(node)["returns"] if row.fn is ops.host else None
        return ops.STRUCT_OF_RETURNS[returns] if returns else row.struct

    # --------------------------------------------------------------------------------------------------- refusing

    def error(self, what: str, hint: str) -> GraphError:
        """A GraphError at the user's line."""
        return GraphError(what, where=self.here(), hint=hint)

    def data_error(self, what: str, hint: str) -> GraphError:
        """For Python code that would need the value of a tensor while the algorithm is being traced."""
        where = self.here()
        line = linecache.getline(self.file, where.line).strip()
        return GraphError(f"{what} a value that does not exist yet: `{line}`", where=where, hint=hint)

    def refuse(self, what: str, hint: str) -> NoReturn:
        """Raise the GraphError."""
        raise self.error(what, hint)

    def _check_op(self, row: ops.Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Tensors and numbers of rx's own maths stand where they belong; roles check their arguments themselves."""
        if not row.tensors:
            return
        for name, value in row.signature.bind(*args, **kwargs).arguments.items():
            if name in row.tensors:
                self._check_tensor(row.name, value)
            elif isinstance(value, bool) or not isinstance(value, int | float):
                self.refuse(f"`{name}` of {row.name} must be a number", "use a number, or a parameter")

    def _check_tensor(self, op: str, value: Any) -> None:
        if not isinstance(value, Value):
            self.refuse(f"`{op}` of {value!r}, which is not a traced tensor", "pass a value of the algorithm")
        struct = value.node.meta["struct"]
        if struct is not None:
            fields = ", ".join(f".{f}" for f in FIELDS[struct]) or "none that maths can use"
            self.refuse(f"`{op}` on {self.name_of(value)}, which is a {struct}", f"its fields are {fields}")

    def _check_torch(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        listed = torch_op_name(kind, target)
        if listed is None:
            self.refuse(f"`{name}` cannot be part of an algorithm's graph", instead_of(name))
        foreign = sorted(_FOREIGN_ARGUMENTS & set(kwargs))
        strings = [a for a in args[1:] if isinstance(a, str)]
        if foreign or strings:
            self.refuse(f"`{name}` with {', '.join(foreign or strings)}", "the job says where things run; drop it")
        if TORCH_OPS[listed].kind != "pointwise" and any(isinstance(a, Value) for a in (*args[1:], *kwargs.values())):
            self.refuse(f"`{name}` along a dim, or at an index, that is a traced value", "use numbers, or parameters")
        for value in (*args, *kwargs.values()):
            if isinstance(value, Value):
                self._check_tensor(name, value)

    def _argument(self, value: Any) -> Any:
        """A value as an fx argument; only numbers, strings, dtypes and traced values may stand in a plan."""
        match value:
            case Value():
                return value.node
            case None | bool() | int() | float() | str() | torch.dtype():
                return value
            case tuple() | list():
                return tuple(self._argument(v) for v in value)
            case dict():
                return {k: self._argument(v) for k, v in value.items()}
            case slice():
                return slice(self._argument(value.start), self._argument(value.stop), self._argument(value.step))
            case _ if value is ...:
                return value
            case torch.Tensor():
                self.refuse(
                    "a tensor made in the algorithm cannot be part of a plan", "use a Python number, or a parameter"
                )
            case _:
                hint = getattr(value, "misuse", "use numbers, parameters and traced values")
                self.refuse(f"{value!r} cannot be an argument here", hint)

    def _track(self, node: Node) -> None:
        """Refuse values of theta_k after the update that ends it, then note what the node depends on."""
        theta = frozenset(r for i in node.all_input_nodes for r in self._theta[i])
        name = graphs.role(node)
        # An update may take a loss computed before another role's update: all updates happen together, at the end.
        over = {name} if graphs.is_op(node, ops.update) else {*theta, name}
        for gone in sorted(over & set(self.updated)):
            self._refuse_late_use(node, gone)
        self._theta[node] = theta | {name}
        if graphs.is_op(node, ops.generate) or any(i in self._late for i in node.all_input_nodes):
            self._late.add(node)

    def _refuse_late_use(self, node: Node, gone: str) -> NoReturn:
        if graphs.is_op(node, ops.update):
            self.refuse(
                f"`{gone}` is updated twice, first at line {self.updated[gone].line}", "add the losses and update once"
            )
        self.refuse(
            f"a value of `{gone}` is used after its update at line {self.updated[gone].line}",
            f"move the line before {gone}.update(..): after it, theta is already that of the next step",
        )

    def name_of(self, value: Value) -> str:
        """The user's name for a value, if it has one by now."""
        self._name_values()
        return value.node.meta["label"] or value.node.name

    def responds(self, value: Value) -> bool:
        """Whether a value depends on a response sampled in this step."""
        return value.node in self._late

    # ---------------------------------------------------------------------------------------- the user's frames

    def here(self) -> Loc:
        """The innermost line of the algorithm's file, else of any file that is neither ours nor torch's."""
        frames = list(self._frames())
        frame = next((f for f in frames if f.f_code.co_filename == self.file), frames[0])
        return Loc(Path(frame.f_code.co_filename).name, frame.f_lineno)

    def _frames(self) -> Iterator[FrameType]:
        """The user's frames, innermost first, out to the algorithm itself."""
        frame = sys._getframe(1)
        while frame is not None:
            if not frame.f_code.co_filename.startswith(_OURS):
                yield frame
            if frame.f_code is self.code:
                return
            frame = frame.f_back

    def _name_values(self) -> None:
        """Give values the name of the variable that holds them, the algorithm's own variables first."""
        for frame in reversed(list(self._frames())):
            arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            for name, value in list(frame.f_locals.items()):
                if isinstance(value, Value) and value.node.meta["label"] is None and name not in arguments:
                    value.node.meta["label"] = name


def _one_spelling(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Torch's arguments under one name each: torch takes `axis` for `dim`, and its first argument as `input`."""
    renamed = {_SPELLING.get(k, k): v for k, v in kwargs.items()}
    first = (renamed.pop("input"),) if "input" in renamed else ()
    return (*first, *args), renamed


def closest(name: str, names: Any) -> str:
    """`did you mean ..?` or the list of what there is."""
    match = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean `{match[0]}`?" if match else f"there is: {', '.join(names)}"
