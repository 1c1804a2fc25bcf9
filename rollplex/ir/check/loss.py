"""The loss taken apart is the loss of the graph: its records are the graph's own, or one of three derived forms.

    in the graph                    in `group`, where the loss of one prompt group is computed with its gradient
    x = rx.masked_mean(v, mask)     x.sum = rx.masked_sum(v, mask)             x = rx.portion(x.sum, mask.count)
    x = torch.mean(v)               x.group = torch.mean(v)                    x = rx.portion(x.group, prompts.count)
    x = operator.add(s, 3)          x.portion = rx.portion(3, prompts.count)   x = operator.add(s, x.portion)
    anything else                   itself
What does not depend on the role's forward is in `step`, with the counts that the portions divide by. Where names alone
do not tell whether prompts are mixed (a mean over dim -1), both readings are allowed. A divisor that is left to the end
divides every part of the loss, each once, and is read by nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollplex.ir.check.facts import Facts
from rollplex.ir.check.graph import inputs, is_call, is_maths, updates
from rollplex.ir.check.maths import ADDS, DIVIDES, MEANS, OVER_MASK, SUMS, Known, mixes, over_prompts, rows_of
from rollplex.ir.check.rules import Violation
from rollplex.ir.plan import LossPlan, NodeRecord

State = Literal["group", "sum", "?"]
_NO_GRADIENT = ("rx.generate", "rx.prefix", "rx.update", "rx.host")
_LENGTHS, _PROMPTS = "prompts.lengths", "prompts.count"


@dataclass
class Expected:
    """What the split of one role's loss must be, built in one walk over the graph."""

    facts: Facts
    role: str
    loss: LossPlan
    update: NodeRecord
    state: dict[str, State] = field(default_factory=dict)
    rows: dict[str, Known] = field(default_factory=dict)
    step: list[NodeRecord] = field(default_factory=list)
    group: list[NodeRecord] = field(default_factory=list)
    wrong: list[Violation] = field(default_factory=list)

    def walk(self) -> Expected:
        """Take the graph apart as the plan should have it, following the plan where both readings are allowed."""
        graph = self.facts.plan.graph
        behind, forward = _behind(graph, self.result), set(self.forward)
        reached = _reached(graph, forward)
        self.state = dict.fromkeys(forward, "group")
        for record in graph:
            self.rows[record.name] = rows_of(record, self.rows) if is_maths(record) else True
            if record.name not in behind or record.name in forward:
                continue
            if record.name in reached:
                self._group(record)
            elif is_maths(record):
                self.step.append(_as(record))
        return self

    @property
    def result(self) -> str:
        """The loss of the graph: what its update takes."""
        return next(iter(inputs(self.update)), "")

    @property
    def forward(self) -> tuple[str, ...]:
        """The calls that the gradient goes back into."""
        graph = self.facts.plan.graph
        behind = _behind(graph, self.result)
        mine = (r for r in graph if is_call(r) and r.op not in _NO_GRADIENT and r.args[0] == self.role)
        return tuple(r.name for r in mine if r.name in behind)

    # ---- one record

    def _group(self, record: NodeRecord) -> None:
        forms = self._forms(record)
        at = len(self.group)
        taken = next((f for f in forms if list(self.loss.group[at : at + len(f)]) == f), forms[0])
        for divisor in (r.args[1]["ref"] for r in taken if r.op == "rx.portion"):
            self._count(divisor, record)
        self.group += taken
        self.state[record.name] = self._state(record, taken)

    def _forms(self, record: NodeRecord) -> list[list[NodeRecord]]:
        """The forms that a record may have, the likelier first."""
        states = {self.state[n] for n in inputs(record) if n in self.state}
        if record.op == "rx.masked_mean":
            return [_masked(record)]
        if record.op in MEANS:
            whole = over_prompts(record)
            plain, portion = [_as(record)], [_as(record, f"{record.name}.group"), _portion(record, ".group")]
            if states == {"sum"} or whole is False:
                return [plain]
            return [portion] if whole and "?" not in states else [plain, portion]
        if record.op in ADDS and states & {"sum", "?"}:
            apart = self._added(record)
            return [apart] if "sum" in states else [[_as(record)], apart]
        return [[_as(record)]]

    def _added(self, record: NodeRecord) -> list[NodeRecord]:
        """Each group adds its portion of what is no sum over groups."""
        made, args = list[NodeRecord](), list(record.args)
        for i, value in enumerate(args):
            if not (isinstance(value, dict) and value.get("ref") in self.state):
                args[i] = {"ref": f"{record.name}.portion"}
                made.append(_record(f"{record.name}.portion", "rx.portion", (value, {"ref": _PROMPTS}), record.loc))
        return [*made, _as(record).model_copy(update={"args": tuple(args)})]

    def _state(self, record: NodeRecord, taken: list[NodeRecord]) -> State:
        states = {self.state[n] for n in inputs(record) if n in self.state}
        if record.op in OVER_MASK or len(taken) > 1 or "sum" in states:
            return "sum"
        if record.op in (*SUMS, *MEANS) and over_prompts(record) is not False:
            return "sum" if over_prompts(record) else "?"
        return "?" if "?" in states else "group"

    def _count(self, divisor: str, record: NodeRecord) -> None:
        """The count that a portion divides by, made once."""
        if any(r.name == divisor for r in self.step):
            return
        if divisor != _PROMPTS:
            mask = {"ref": divisor.removesuffix(".count")}
            self.step.append(_record(divisor, "rx.mask_count", (mask,), record.loc))
            return
        rollout = next((r.name for r in self.facts.plan.graph if r.op == "rx.generate"), "")
        self.step.append(_record(_LENGTHS, "rx.field", ({"ref": rollout}, "lengths"), self.update.loc))
        self.step.append(_record(_PROMPTS, "rx.rows", ({"ref": _LENGTHS},), self.update.loc))


# ---- records


def _record(name: str, op: str, args: tuple[Any, ...], loc: str) -> NodeRecord:
    return NodeRecord(name=name, op=op, args=args, loc=loc)


def _as(record: NodeRecord, name: str = "") -> NodeRecord:
    """A record of the graph as a loss has it: without a phase."""
    return record.model_copy(update={"phase": "", "name": name or record.name})


def _portion(record: NodeRecord, suffix: str, divisor: str = _PROMPTS) -> NodeRecord:
    return _record(record.name, "rx.portion", ({"ref": record.name + suffix}, {"ref": divisor}), record.loc)


def _masked(record: NodeRecord) -> list[NodeRecord]:
    mask = record.kwargs.get("mask", record.args[1] if len(record.args) > 1 else None)
    name = mask.get("ref", "") if isinstance(mask, dict) else ""
    summed = _as(record, f"{record.name}.sum").model_copy(update={"op": "rx.masked_sum"})
    return [summed, _portion(record, ".sum", f"{name}.count")]


def _behind(graph: Sequence[NodeRecord], name: str) -> set[str]:
    """A name and all that it is made of."""
    found = {name}
    for record in reversed(graph):
        if record.name in found:
            found.update(inputs(record))
    return found


def _reached(graph: Sequence[NodeRecord], sources: set[str]) -> set[str]:
    found = set(sources)
    found.update(r.name for r in graph if found.intersection(inputs(r)))
    return found


# ---- what the plan says


def _parts(e: Expected) -> Iterator[Violation]:
    """Records and names, one by one; the first that differs in each list is told."""
    loss, where = e.loss, f"loss of {e.role}"
    for what, told, right in (("step", loss.step, e.step), ("group", loss.group, e.group)):
        for i in range(max(len(told), len(right))):
            if told[i : i + 1] != tuple(right[i : i + 1]):
                has, asked = (f"%{r[i].name} = {r[i].op}" if i < len(r) else "nothing" for r in (told, right))
                says = f"{what} has {has}, the graph {asked}" if has != asked else f"{what} has another {has}"
                yield Violation("loss", says, where=where)
                break
    for what, told, right in (("loss", loss.loss, e.result), ("result", loss.result, e.result)):
        if told != right:
            yield Violation("loss", f"{what} is %{told}, the update takes %{right}", where=where)
    if loss.forward != e.forward:
        what = f"forward is {', '.join(loss.forward) or 'nothing'}, the graph has {', '.join(e.forward) or 'nothing'}"
        yield Violation("loss", what, where=where)


def _frontier(e: Expected) -> Iterator[Violation]:
    """What groups read beside the forward: with a row for each prompt it is cut to the group, else passed on."""
    made = {r.name for r in e.loss.group}
    read = dict.fromkeys(n for r in e.loss.group for n in inputs(r) if n not in made and n not in e.loss.forward)
    rows = {n: e.rows.get(n, False) for n in read}
    sliced = [n for n in read if rows[n] or (rows[n] is None and n in e.loss.sliced)]
    whole = [n for n in read if n not in sliced]
    for what, told, right in (("sliced", e.loss.sliced, sliced), ("whole", e.loss.whole, whole)):
        if list(told) != right:
            yield _lists(e, what, told, right)


def _wide(e: Expected) -> Iterator[Violation]:
    """What mixes prompts is computed from those of all ranks, out of what the step does not make itself."""
    graph = {r.name for r in e.facts.plan.graph}
    mixed = {r.name: mixes(r, e.rows) if r.name in graph else True for r in e.loss.step if r.op != "rx.field"}
    right = [n for n, known in mixed.items() if known or (known is None and n in e.loss.wide)]
    if list(e.loss.wide) != right:
        yield _lists(e, "wide", e.loss.wide, right)
    given = _given(right, {r.name: r for r in e.loss.step})
    if list(e.loss.wide_inputs) != given:
        yield _lists(e, "wide_inputs", e.loss.wide_inputs, given)


def _divisor(e: Expected) -> Iterator[Violation]:
    """What is divided by at the end instead: nothing that is told must be missing, and nothing else be divided so."""
    loss, graph = e.loss, {r.name for r in e.facts.plan.graph}
    readings = []
    for states in (("sum",), ("sum", "?")):
        sums = {r.name for r in loss.group if r.name not in graph or e.state.get(r.name) in states}
        readings.append(_dividing(loss, sums))
    if loss.divisor not in readings:
        what = f"the divisor is {loss.divisor or 'none'}, the records divide by {readings[0] or 'no one value'}"
        yield Violation("loss", what, where=f"loss of {e.role}")
    given = _given([loss.divisor], {r.name: r for r in loss.step}) if loss.divisor else []
    if list(loss.divisor_inputs) != given:
        yield _lists(e, "divisor_inputs", loss.divisor_inputs, given)


def _dividing(loss: LossPlan, sums: set[str]) -> str:
    """The wide value by which each part of the loss is divided exactly once; "" where there is none."""
    counts: dict[str, set[tuple[str, ...]]] = {}
    for r in loss.group:
        if r.name not in sums:
            continue
        by = _second(r) if r.op in DIVIDES and _second(r) in loss.wide else None
        parts = set().union(*(counts.get(n, set()) for n in inputs(r))) or {()}
        counts[r.name] = {(*p, by) for p in parts} if by else parts
    found = counts.get(loss.result, {()})
    by = next(iter(found))
    if len(found) > 1 or len(by) != 1:
        return ""
    others = (r for r in loss.group if by[0] in inputs(r))
    return by[0] if all(r.name in sums and r.op in DIVIDES and r.args[0] != r.args[1] for r in others) else ""


def _second(record: NodeRecord) -> str:
    second = record.args[1] if len(record.args) == 2 else None
    return str(second.get("ref", "")) if isinstance(second, dict) else ""


def _given(names: Sequence[str], made: Mapping[str, NodeRecord]) -> list[str]:
    """What values are made of and no record makes; a record of a plan file may read itself."""
    todo, seen = list(names), set[str]()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += inputs(made[name]) if name in made else ()
    return sorted(seen - set(made))


def _lists(e: Expected, what: str, told: Sequence[str], right: Sequence[str]) -> Violation:
    says = f"{what} has {', '.join(told) or 'nothing'}, by its records {', '.join(right) or 'nothing'}"
    return Violation("loss", says, where=f"loss of {e.role}")


def check_loss(facts: Facts) -> Iterator[Violation]:
    """Every updated role has its loss taken apart as the graph has it."""
    asked, losses = updates(facts), facts.plan.losses
    for role in sorted({*asked, *losses}):
        if role not in asked or role not in losses:
            what = "its loss is not taken apart" if role in asked else "the graph has no update of it"
            yield Violation("loss", what, where=f"loss of {role}")
            continue
        if losses[role].role != role:
            yield Violation("loss", f"it is that of {losses[role].role}", where=f"loss of {role}")
        expected = Expected(facts, role, losses[role], asked[role]).walk()
        for check in (_parts, _frontier, _wide, _divisor):
            yield from check(expected)
