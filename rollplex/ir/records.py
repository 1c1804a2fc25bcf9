"""A graph as data, and the interpreter that runs its tensor maths from that data without any code of the user.

{"name": "ratio", "op": "torch.exp", "args": [{"ref": "sub"}], "loc": "grpo.py:19"}

Only what is in the tables of ops and torch_ops is ever executed: a plan is data, whoever wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from rollplex.ir import graph as g
from rollplex.ir.errors import Loc, PlanError
from rollplex.ir.ops import OPS
from rollplex.ir.params import plain
from rollplex.ir.plan import NodeRecord, references
from rollplex.ir.torch_ops import TORCH_OPS

_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def to_records(graph: Graph, phases: Mapping[str, str] | None = None) -> list[NodeRecord]:
    """Every node of a graph but its output, in order."""
    return [to_record(n, (phases or {}).get(n.name, "")) for n in graph.nodes if n.op != "output"]


def to_record(node: Node, phase: str = "") -> NodeRecord:
    """One node as data."""
    return NodeRecord(
        name=node.name,
        op=g.record_name(node),
        args=tuple(encode(a) for a in node.args),
        kwargs={k: encode(v) for k, v in node.kwargs.items()},
        loc=str(g.loc(node)),
        phase=phase,
    )


def to_graph(records: Sequence[NodeRecord]) -> Graph:
    """The graph behind records, as far as passes after the split need it: calls, what they read, where they come from.

    Raises PlanError for an op that is in no table.
    """
    graph, env = Graph(), dict[str, Any]()
    for record in records:
        args, kwargs = decode(record.args, env), {k: decode(v, env) for k, v in record.kwargs.items()}
        node = _node(graph, record, args, kwargs)
        file, _, line = record.loc.rpartition(":")
        node.meta["loc"] = Loc(file, int(line)) if line.isdecimal() else Loc(record.loc, 0)
        env[record.name] = node
    return graph


def _node(graph: Graph, record: NodeRecord, args: tuple, kwargs: dict[str, Any]) -> Node:
    space, _, name = record.op.partition(".")
    if record.op == "input":
        return graph.create_node("placeholder", record.name, name=record.name)
    if space == "Tensor" and record.op in TORCH_OPS:
        return graph.create_node("call_method", name, args, kwargs, name=record.name)
    row = OPS[record.op].fn if record.op in OPS else TORCH_OPS[record.op].run if record.op in TORCH_OPS else None
    if row is None:
        raise PlanError(f"no op `{record.op}`", where=record.loc, hint="compile the plan again")
    return graph.create_node("call_function", row, args, kwargs, name=record.name)


def encode(value: Any) -> Any:
    """An argument as JSON has it: references, dtypes, slices and infinities are objects with one key."""
    match value:
        case Node():
            return {"ref": value.name}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case slice():
            return {"slice": [plain(v) for v in (value.start, value.stop, value.step)]}
        case tuple() | list():
            return [encode(v) for v in value]
        case float() if not math.isfinite(value):
            return {"float": str(float(value))}
        case _ if value is ...:
            return {"ellipsis": True}
        case _:
            return plain(value)


def decode(value: Any, env: Mapping[str, Any]) -> Any:
    """The argument of an encoded value; references are looked up. Raises PlanError for an object of another form."""
    match value:
        case {"ref": str(name)}:
            return env[name]
        case {"dtype": str(name)} if name in _DTYPES:
            return _DTYPES[name]
        case {"slice": [start, stop, step]}:
            return slice(start, stop, step)
        case {"float": "inf" | "-inf" | "nan" as number}:
            return float(number)
        case {"ellipsis": True}:
            return ...
        case dict():
            raise PlanError(f"not an argument of an op: {value}", hint="compile the plan again")
        case tuple() | list():
            return tuple(decode(v, env) for v in value)
        case _:
            return value


def inputs_of(record: NodeRecord) -> tuple[str, ...]:
    """The names a record reads, each once."""
    return tuple(dict.fromkeys([*references(record.args), *references(record.kwargs)]))


def is_pure(record: NodeRecord) -> bool:
    """Whether the interpreter can run a record: a torch op of the list, or a tensor op of ours."""
    return record.op in TORCH_OPS or (record.op in OPS and OPS[record.op].pure)


def evaluate(records: Sequence[NodeRecord], env: Mapping[str, Any], wanted: Iterable[str]) -> dict[str, Any]:
    """The wanted values, given those in `env`; nothing else is computed, and only tensor maths is.

    `env` holds tensors by node name; a struct (prompts, a rollout) is any object or mapping with its fields.
    Raises PlanError when a wanted value needs a model or host call whose result is not in `env`.
    """
    wanted = tuple(wanted)
    values = dict(env)
    for record in _needed(records, env, wanted):
        values[record.name] = _run(record, values)
    missing = [name for name in wanted if name not in values]
    if missing:
        raise PlanError(f"no value or record named {', '.join(missing)}", hint="compile the plan again")
    return {name: values[name] for name in wanted}


def _needed(records: Sequence[NodeRecord], env: Mapping[str, Any], wanted: Iterable[str]) -> list[NodeRecord]:
    """The records behind the wanted names that are not given, in order."""
    names = set(wanted) - set(env)
    found = []
    for record in reversed(records):
        if record.name in names:
            found.append(record)
            names |= set(inputs_of(record)) - set(env)
    return found[::-1]


def _run(record: NodeRecord, values: Mapping[str, Any]) -> Any:
    if not is_pure(record):
        raise PlanError(
            f"%{record.name} = {record.op} is not tensor maths and its value is not given",
            where=record.loc,
            hint="a model or a host call must have run before",
        )
    absent = [name for name in inputs_of(record) if name not in values]
    if absent:
        raise PlanError(f"%{record.name} reads {', '.join(absent)}, which comes later or not at all", where=record.loc)
    fn = TORCH_OPS[record.op].run if record.op in TORCH_OPS else OPS[record.op].fn
    return fn(*decode(record.args, values), **{k: decode(v, values) for k, v in record.kwargs.items()})
