"""Where each actor tensor lies so that trainer and rollout engine read one physical copy (paper section 3.3).

The job's `layout.order` says which options there are (`layout_options.py`): `stock`, the rows as the rollout engine
comes; `reindex`, rows in the trainer's order wherever the engine can re-index activations instead; `auto`, either.

Data        c       weight class (qkv, gate_up, o, down, ..)     o      option of a class
            B[c,o]  buffer bytes a GPU      S[c,o]  seconds it adds to a step: slower decode, copies after the update
            K[c,o]  slabs of a tensor       r       rent of HBM: seconds of decode over bytes of capacity
            g       GPU of a training group, = training rank     e, R   rollout engine, rank within it;  q = TP_t / TP_r
Variables   x[c,o]  class c takes option o                       y[g,e,R]  GPU g hosts rollout rank R of engine e
Constraints (1)  sum_o x[c,o] = 1                   for each c
            (2)  sum_{e,R} y[g,e,R] = 1             for each g
            (3)  sum_g y[g,e,R] = 1                 for each e, R
            (4)  y[g,e,R] = 0 unless R = g // q     (training rank g owns a slab of rollout rank g // q only)
Objective   stock, reindex: buffer bytes sum B x, then seconds sum S x; auto: seconds and rent, sum (S + r B) x.
            Then slabs sum K x, then engine order sum |e - g mod q| y[g,e,R].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ortools.sat.python import cp_model

from rollplex.ir.errors import PassError
from rollplex.ir.job import Job
from rollplex.ir.job_schema import LayoutOrder
from rollplex.ir.module import Module
from rollplex.ir.plan import CaseBytes, LayoutAlternative, LayoutClass, LayoutSummary, SolverResult, TensorPlacement
from rollplex.passes.layout_costs import LayoutCosts
from rollplex.passes.layout_options import CASE, Option, Options, WeightClass
from rollplex.passes.solver import Objective, Solution, minimise

Chosen = Mapping[str, Option]


@dataclass(frozen=True)
class Layout:
    """The chosen option of every weight class, the rank placement, and what an update must exchange."""

    made_by: ClassVar[str] = "layout"
    summary: LayoutSummary
    solvers: tuple[SolverResult, ...]

    def __str__(self) -> str:
        s = self.summary
        rows = [
            f"{c.name:<16} case {c.case} {c.view:<10} slabs {c.slabs} {c.params / 1e9:8.3f} B"
            f"  buffer {c.buffer_bytes / 2**30:5.2f}  receives {c.receives_bytes / 2**30:5.2f} GiB  {c.why}"
            for c in s.classes
        ]
        buffer, exchange = s.case3_buffer_bytes / 2**30, s.exchange_bytes_per_gpu / 2**30
        total = f"buffer {buffer:.2f} GiB  exchange {exchange:.2f} GiB a GPU"
        return "\n".join([*rows, f"{s.order} order, q = {s.q}  {total}"])


@dataclass(frozen=True)
class Variables:
    """x[c,o] and y[g,e,R] of the docstring."""

    x: dict[tuple[str, str], cp_model.IntVar]
    y: dict[tuple[int, int, int], cp_model.IntVar]


@dataclass(frozen=True)
class Weights:
    """What a solve minimises: `rent_s` is r of the docstring, None where bytes come first."""

    rent_s: float | None = None

    def objectives(self, classes: Sequence[WeightClass], v: Variables, q: int) -> list[Objective]:
        """The objectives of the docstring, in order; bytes in KiB, seconds in microseconds."""

        def total(value: dict[tuple[str, str], int]) -> cp_model.LinearExprT:
            return sum(n * v.x[key] for key, n in value.items())

        options = {(c.name, o.view): o for c in classes for o in c.options}
        kib = {key: o.buffer_bytes >> 10 for key, o in options.items()}
        micro = {key: round(o.seconds * 1e6) for key, o in options.items()}
        slabs = {key: o.slabs for key, o in options.items()}
        order = sum(abs(e - g % q) * literal for (g, e, _), literal in v.y.items())
        last = [Objective("slabs a class", total(slabs)), Objective("engine order", order)]
        if self.rent_s is None:
            return [Objective("buffer bytes", total(kib), 1024), Objective("layout seconds", total(micro), 1e-6), *last]
        rented = {key: micro[key] + round(o.buffer_bytes * self.rent_s * 1e6) for key, o in options.items()}
        return [Objective("layout and rent seconds", total(rented), 1e-6), *last]


def build(classes: Sequence[WeightClass], tp_t: int, tp_r: int) -> tuple[cp_model.CpModel, Variables]:
    """The variables and constraints of the docstring."""
    model, q = cp_model.CpModel(), tp_t // tp_r
    x = {(c.name, o.view): model.new_bool_var(f"x[{c.name},{o.view}]") for c in classes for o in c.options}
    slots = [(e, r) for e in range(q) for r in range(tp_r)]
    y = {(g, e, r): model.new_bool_var(f"y[{g},{e},{r}]") for g in range(tp_t) for e, r in slots}
    for c in classes:  # (1)
        model.add_exactly_one(x[c.name, o.view] for o in c.options)
    for g in range(tp_t):  # (2)
        model.add_exactly_one(y[g, e, r] for e, r in slots)
    for e, r in slots:  # (3)
        model.add_exactly_one(y[g, e, r] for g in range(tp_t))
    for (g, _, r), literal in y.items():  # (4)
        if r != g // q:
            model.add(literal == 0)
    return model, Variables(x, y)


@dataclass(frozen=True)
class Decision:
    """A solved row order: options by class, GPUs of every rollout engine of one training group."""

    classes: tuple[WeightClass, ...]
    chosen: Chosen
    placement: dict[str, tuple[int, ...]]
    solvers: tuple[SolverResult, ...]


def decide(job: Job, order: LayoutOrder) -> Decision:
    """Solve the layout of the job's actor under a row order."""
    classes = Options(job, order).classes()
    model, v = build(classes, job.train_tp, job.rollout_tp)
    objectives = Weights(LayoutCosts(job).rent_s_per_byte if order == "auto" else None).objectives(classes, v, job.q)
    solution = minimise(model, "layout", objectives, seconds=job.solver.seconds, seed=job.solver.seed)
    if solution is None:
        raise PassError("no placement of training and rollout ranks shares a slab on every GPU")
    chosen = {c.name: next(o for o in c.options if solution.true(v.x[c.name, o.view])) for c in classes}
    return Decision(tuple(classes), chosen, _placement(job, v, solution), solution.results)


def _placement(job: Job, v: Variables, solution: Solution) -> dict[str, tuple[int, ...]]:
    ranks, gpus = range(job.rollout_tp), range(job.train_tp)
    return {f"engine {e}": tuple(g for r in ranks for g in gpus if solution.true(v.y[g, e, r])) for e in range(job.q)}


# ---- what the plan says of it


def layout_class(c: WeightClass, o: Option) -> LayoutClass:
    """A class as it is printed, with its part of the exchange."""
    return LayoutClass(
        name=c.name, view=o.view, case=CASE[o.view], tensors=len(c.tensors), params=sum(t.numel for t in c.tensors),
        slabs=o.slabs, pieces=c.pieces, shard_bytes=c.shard_bytes, buffer_bytes=o.buffer_bytes,
        sends_bytes=c.sends_bytes, receives_bytes=c.receives_bytes,
        decode_s=round(o.decode_s, 6), rebuild_s=round(o.rebuild_s, 6), needs=o.needs, why=o.why,
    )  # fmt: skip


def case_bytes(classes: Sequence[LayoutClass], itemsize: int) -> dict[str, CaseBytes]:
    """Parameters and bytes of every case over the whole language model."""
    params = {k: sum(c.params for c in classes if c.case == k) for k in (1, 2, 3)}
    return {str(k): CaseBytes(params=n, bytes=n * itemsize) for k, n in params.items()}


def alternative(job: Job, order: LayoutOrder) -> LayoutAlternative:
    """What another row order would give."""
    found = decide(job, order)
    classes = [layout_class(c, found.chosen[c.name]) for c in found.classes]
    return LayoutAlternative(
        order=order,
        cases=case_bytes(classes, job.itemsize),
        case3_buffer_bytes=sum(c.buffer_bytes for c in classes),
        seconds=round(sum(c.decode_s + c.rebuild_s for c in classes), 6),
    )


def summarise(job: Job, found: Decision) -> LayoutSummary:
    """Cases over the whole model, buffer and exchange for one GPU, and the placement of ranks."""
    classes = tuple(layout_class(c, found.chosen[c.name]) for c in found.classes)
    tower = [TensorPlacement(name=t.name, case=1, why="replicated") for t in job.spec.tensors() if t.part == "vision"]
    exchange = sum(c.receives_bytes for c in classes)
    orders: tuple[LayoutOrder, ...] = ("stock", "reindex")
    return LayoutSummary(
        q=job.q,
        order=job.layout.order,
        cases=case_bytes(classes, job.itemsize),
        case3_buffer_bytes=sum(c.buffer_bytes for c in classes),
        exchange_bytes_per_gpu=exchange,
        exchange_s=round(LayoutCosts(job).exchange_s(exchange), 6),
        placement=found.placement,
        groups=job.gpus // job.train_tp,
        classes=classes,
        needs=tuple(dict.fromkeys(c.needs for c in classes if c.needs)),
        alternatives=tuple(map(partial(alternative, job), (o for o in orders if o != job.layout.order))),
        tensors=(*tower, *_tensors(found)),
    )


def _tensors(found: Decision) -> list[TensorPlacement]:
    return [
        TensorPlacement(name=t.name, case=CASE[o.view], slabs=o.slabs * c.pieces, why=o.why)
        for c, o in ((c, found.chosen[c.name]) for c in found.classes)
        for t in c.tensors
    ]


@dataclass(frozen=True)
class LayoutPass:
    """Classify every actor tensor as alias, transpose or rebuild, and place rollout ranks on training GPUs.

    Job keys: `layout`, `model`, `roles`, `solver`.
    """

    name: ClassVar[str] = "layout"
    needs: ClassVar[tuple[type, ...]] = ()
    makes: ClassVar[type] = Layout

    def run(self, module: Module) -> Module:
        """Solve the layout of the job's actor; see the module's docstring."""
        found = decide(module.job, module.job.layout.order)
        return module.put(Layout(summarise(module.job, found), found.solvers))
