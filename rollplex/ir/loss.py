"""Take a loss apart by prompt group: what is computed once for the step, what for each group, and how groups add up.

A value that depends on the trained role's forward is `group` (it has its prompt's rows only) or `sum` (a sum over
groups so far). Only what is linear may follow a sum; anything else couples prompt groups and is refused by name.
A normaliser of the whole batch that divides all of the sum (`divisors`) is left to the end, so that no group waits for
another's responses: gradients are accumulated without it, and scaled once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal

from torch.fx import Graph, Node

from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.errors import GraphError
from rollplex.ir.plan import LossPlan, NodeRecord
from rollplex.ir.records import inputs_of, is_pure, to_record
from rollplex.ir.torch_ops import reduced_dim
from rollplex.ir.types import PROMPT, TensorType

State = Literal["group", "sum"]
_SUMS = ("torch.sum", "Tensor.sum")
_MEANS = ("torch.mean", "Tensor.mean")
# Linear in one sum, whatever else they take: the factor or the other summand must be known before the forward.
_SCALES = ("operator.mul", "torch.mul", "Tensor.mul", "torch.multiply", "Tensor.multiply")
_DIVIDES = ("operator.truediv", "torch.div", "Tensor.div", "torch.divide", "Tensor.divide", "torch.true_divide")
_ADDS = ("operator.add", "torch.add", "Tensor.add", "operator.sub", "torch.sub", "Tensor.sub")
_KEEPS = ("operator.neg", "operator.pos", "torch.neg", "Tensor.neg", "Tensor.float", "Tensor.double", "torch.unsqueeze")


class _Splitting:
    """One walk over the nodes of a loss that depend on the trained role's forward."""

    def __init__(self, graph: Graph, role: str) -> None:
        self.graph, self.role = graph, role
        self.update = g.updates(graph)[role]
        self.loss: Node = self.update.args[1]  # type: ignore[assignment]
        self.forward = tuple(n for n in graph.nodes if g.calls(n) and g.role(n) == role)
        self.behind = g.ancestors(self.loss)
        self.state: dict[Node, State] = dict.fromkeys(self.forward, "group")
        self.steps = _downstream_free(self.behind, self.forward)
        self.step_records: list[NodeRecord] = []
        self.group_records: list[NodeRecord] = []

    def run(self) -> LossPlan:
        """The plan; raises GraphError naming the op and the line that couple prompt groups."""
        for node in self.graph.nodes:
            if node not in self.behind or node in self.forward:
                continue
            if node in self.steps:
                self._step(node)
            else:
                self._group(node)
        return self._plan()

    # ------------------------------------------------------------------------------------------------- one node

    def _step(self, node: Node) -> None:
        """A value known before the forward: maths runs once for the step, results of models and hosts are given."""
        record = to_record(node)
        if is_pure(record):
            self.step_records.append(record)

    def _group(self, node: Node) -> None:
        """A value of the forward: copied into the group program, its reductions over prompts turned into sums."""
        states = {self.state[i] for i in node.all_input_nodes if i in self.state}
        if mixes_prompts(node):
            self._reduce(node)
        elif "sum" in states:
            self._linear(node)
        else:
            self.state[node] = "group"
            self._emit(node)

    def _reduce(self, node: Node) -> None:
        name = g.record_name(node)
        if any(self.state.get(i) == "sum" for i in node.all_input_nodes):
            raise self._coupled(node)
        self.state[node] = "sum"
        if g.is_op(node, ops.masked_mean, ops.masked_sum):
            self._masked(node)
        elif name in _SUMS:
            self._emit(node)
        elif name in _MEANS:
            self._emit(node, f"{node.name}.group")
            self._portion(node.name, {"ref": f"{node.name}.group"}, self._prompts(), node)
        else:
            raise self._coupled(node)

    def _masked(self, node: Node) -> None:
        mask = g.bound_arguments(node)["mask"]
        if mask in self.state:
            raise self._coupled(node, f": its mask comes from the forward of `{self.role}`")
        if g.is_op(node, ops.masked_sum):
            self._emit(node)
            return
        count = f"{mask.name}.count"
        self._add_step(count, "rx.mask_count", ({"ref": mask.name},), node)
        record = to_record(node).model_copy(update={"name": f"{node.name}.sum", "op": "rx.masked_sum"})
        self.group_records.append(record)
        self._portion(node.name, {"ref": record.name}, count, node)

    def _linear(self, node: Node) -> None:
        """An op on a sum over groups: it must be linear, and its other arguments known before the forward."""
        name, row = g.record_name(node), g.torch_op_of(node)
        sums = [a for a in node.args if isinstance(a, Node) and self.state.get(a) == "sum"]
        rows = [a for a in node.all_input_nodes if self.state.get(a) == "group" or _has_prompt(a)]
        self.state[node] = "sum"
        if rows or any(isinstance(v, Node) for v in node.kwargs.values()):
            raise self._coupled(node)
        reduction = name in (*_SUMS, *_MEANS)
        scaled = (name in _SCALES and len(sums) == 1) or (name in _DIVIDES and sums == [node.args[0]])
        if name in _KEEPS or reduction or (scaled and not node.kwargs):
            self._emit(node)
        elif name in _ADDS and row is not None and not node.kwargs:
            self._add(node)
        else:
            raise self._coupled(node)

    def _add(self, node: Node) -> None:
        """A sum of sums; a constant belongs to the step and each group adds its portion of it."""
        record = to_record(node)
        args = list(record.args)
        for i, argument in enumerate(node.args):
            if not isinstance(argument, Node) or argument not in self.state:
                self._portion(f"{node.name}.portion", args[i], self._prompts(), node)
                args[i] = {"ref": f"{node.name}.portion"}
        self.group_records.append(record.model_copy(update={"args": tuple(args)}))

    # -------------------------------------------------------------------------------------------------- records

    def _emit(self, node: Node, name: str = "") -> None:
        record = to_record(node)
        self.group_records.append(record.model_copy(update={"name": name or node.name}))

    def _portion(self, name: str, value: Any, divisor: str, node: Node) -> None:
        args = (value, {"ref": divisor})
        self.group_records.append(NodeRecord(name=name, op="rx.portion", args=args, loc=str(g.loc(node))))

    def _add_step(self, name: str, op: str, args: tuple[Any, ...], node: Node) -> None:
        if all(r.name != name for r in self.step_records):
            self.step_records.append(NodeRecord(name=name, op=op, args=args, loc=str(g.loc(node))))

    def _prompts(self) -> str:
        """The number of prompts of the step, counted on the lengths of the rollout."""
        rollout = g.find(self.graph, ops.generate)[0]
        self._add_step("prompts.lengths", "rx.field", ({"ref": rollout.name}, "lengths"), self.update)
        self._add_step("prompts.count", "rx.rows", ({"ref": "prompts.lengths"},), self.update)
        return "prompts.count"

    def _coupled(self, node: Node, why: str = "") -> GraphError:
        what = f"the loss couples prompt groups through %{node.name} = {g.record_name(node)}{why}"
        hint = "use rx.masked_mean, .sum() or .mean() over prompts, or statistics within a group"
        return GraphError(what, where=g.loc(node), hint=hint)

    # ------------------------------------------------------------------------------------------------- the plan

    def _plan(self) -> LossPlan:
        made = {r.name for r in self.group_records}
        read = dict.fromkeys(n for r in self.group_records for n in inputs_of(r) if n not in made)
        frontier = [n for n in read if n not in {f.name for f in self.forward}]
        step = {r.name: r for r in self.step_records}
        nodes = {n.name: n for n in self.graph.nodes}
        wide = [n for n in step if n not in nodes or mixes_prompts(nodes[n])]
        self._check_wide(nodes[n] for n in wide if n in nodes)
        sums = {r.name for r in self.group_records if r.name not in nodes or self.state[nodes[r.name]] == "sum"}
        divisor = one_divisor(self.group_records, sums, wide, self.loss.name)
        sliced = [n for n in frontier if n in nodes and _has_prompt(nodes[n])]
        return LossPlan(
            role=self.role,
            loss=self.loss.name,
            step=tuple(self.step_records),
            group=tuple(self.group_records),
            result=self.loss.name,
            forward=tuple(n.name for n in self.forward if n in self.behind),
            wide=tuple(n for n in wide if step[n].op != "rx.field"),
            wide_inputs=_given(step, wide),
            sliced=tuple(sliced),
            whole=tuple(n for n in frontier if n not in sliced),
            divisor=divisor,
            divisor_inputs=_given(step, [divisor]) if divisor else (),
        )

    def _check_wide(self, nodes: Iterable[Node]) -> None:
        """A detached value that mixes prompts and still has a row for each would need all rows on every rank."""
        for node in nodes:
            if _has_prompt(node):
                raise self._coupled(node)


def split_loss(graph: Graph, role: str | None = None) -> LossPlan:
    """Take the loss of a role (of the only trained one, if none is named) apart; the graph must have types."""
    names = list(g.updates(graph))
    assert role or len(names) == 1, f"name one of {names}"
    return _Splitting(graph, role or names[0]).run()


def couples_step(graph: Graph, role: str) -> tuple[Node, str] | None:
    """What of a role's loss is needed for each group and made of all, and why; None where groups may come one by one.

    A divisor that is left to the end is not needed before.
    """
    plan = split_loss(graph, role)
    nodes, step = {n.name: n for n in graph.nodes}, {r.name: r for r in plan.step}
    needed, queue = dict[str, None](), [n for n in (*plan.sliced, *plan.whole) if n != plan.divisor]
    while queue:
        name = queue.pop()
        needed[name] = None
        queue += inputs_of(step[name]) if name in step else ()
    wide = [n for n in plan.wide if n in needed]
    if not wide:
        return None
    for name in (n for n in wide if n in nodes):
        return nodes[name], "mixes the prompts of the whole step"
    first = next(r for r in plan.group if wide[0] in inputs_of(r))
    return nodes[first.name.removesuffix(".portion")], "is not all of the loss that the batch's size divides"


def mixes_prompts(node: Node) -> bool:
    """Whether a row of the result needs rows of other prompts: the prompt dim is reduced, scanned or indexed away."""
    inputs = [i for i in node.all_input_nodes if _has_prompt(i)]
    own, row = g.op_of(node), g.torch_op_of(node)
    if own is not None or not inputs:
        return own is not None and own.separable == "sum" and bool(inputs)
    if row is not None and row.kind == "scan":
        dims = g.type_of(inputs[0]).dims  # type: ignore[union-attr]
        axes = reduced_dim(node.args, node.kwargs)
        return axes is None or any(dims[a] == PROMPT for a in axes)
    return not _has_prompt(node)


def _has_prompt(node: Node) -> bool:
    found = g.type_of(node)
    return isinstance(found, TensorType) and PROMPT in found.dims


def divisors(records: Iterable[NodeRecord], sums: Container[str], wide: Container[str]) -> dict[str, frozenset[str]]:
    """Of each sum over groups, the wide values that its parts are divided by; "" for a part divided by none.

    x.sum = rx.masked_sum(v, m) -> {""}    x = rx.portion(x.sum, m.count) -> {m.count}    x + x.sum -> {m.count, ""}
    """
    found: dict[str, frozenset[str]] = {}
    for record in (r for r in records if r.name in sums):
        by = _divides_by(record, wide)
        parts = frozenset().union(*(found[n] for n in inputs_of(record) if n in found)) or frozenset({""})
        # Divided twice, neither of the two is the whole scale.
        found[record.name] = parts if by is None else frozenset({by}) if parts == {""} else parts | {by}
    return found


def _divides_by(record: NodeRecord, wide: Container[str]) -> str | None:
    """The wide value that a record divides its first argument by."""
    if record.op not in ("rx.portion", *_DIVIDES) or len(record.args) != 2:
        return None
    match record.args:
        case [first, {"ref": str(name)}] if name in wide and first != {"ref": name}:
            return name
        case _:
            return None


def one_divisor(records: Sequence[NodeRecord], sums: Container[str], wide: Container[str], result: str) -> str:
    """The wide value that all parts of a loss are divided by, and that nothing else reads; "" if there is none."""
    parts = divisors(records, sums, wide).get(result, frozenset({""}))
    if len(parts) > 1:
        return ""
    (divisor,) = parts
    readers = [r for r in records if divisor in inputs_of(r)]
    return divisor if all(r.name in sums and _divides_by(r, wide) == divisor for r in readers) else ""


def _given(step: Mapping[str, NodeRecord], names: Iterable[str]) -> tuple[str, ...]:
    """What the step program reads for these names and does not make itself."""
    needed, queue = dict[str, None](), list(names)
    while queue:
        name = queue.pop()
        if name in step:
            queue += inputs_of(step[name])
        else:
            needed[name] = None
    return tuple(sorted(needed))


def _downstream_free(nodes: frozenset[Node], sources: tuple[Node, ...]) -> frozenset[Node]:
    """The nodes that nothing of the forward reaches, by whatever path, detached ones included."""
    reached = set(sources)
    for node in sources[0].graph.nodes:
        if any(i in reached for i in node.all_input_nodes):
            reached.add(node)
    return nodes - reached
