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
from typing import ClassVar

from ortools.sat.python import cp_model

from rollplex.ir.errors import PassError
from rollplex.ir.job import Job
from rollplex.ir.job_schema import LayoutOrder
from rollplex.ir.module import Module
from rollplex.ir.plan import SolverResult
from rollplex.ir.planned_layout import LayoutSummary
from rollplex.passes.layout_costs import LayoutCosts
from rollplex.passes.layout_options import Options, WeightClass
from rollplex.passes.layout_summary import FIXED_ORDERS, Decision, nothing_shared, summarise
from rollplex.passes.solver import Family, Objective, Solution, constrain, minimise


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


class Model:
    """The variables of the docstring, `FAMILIES` are its constraints; `rent_s` is r, None where bytes come first."""

    def __init__(self, classes: Sequence[WeightClass], tp_t: int, tp_r: int, rent_s: float | None = None) -> None:
        self.classes, self.tp_t, self.tp_r, self.q, self.rent_s = classes, tp_t, tp_r, tp_t // tp_r, rent_s
        self.cp = cp_model.CpModel()
        self.slots = [(e, r) for e in range(self.q) for r in range(tp_r)]
        self.options = {(c.name, o.view): o for c in classes for o in c.options}
        self.x = {(c, o): self.cp.new_bool_var(f"x[{c},{o}]") for c, o in self.options}
        self.y = {(g, e, r): self.cp.new_bool_var(f"y[{g},{e},{r}]") for g in range(tp_t) for e, r in self.slots}

    def objectives(self) -> list[Objective]:
        """In order; bytes in KiB, seconds in microseconds."""
        micro = {key: round(o.seconds * 1e6) for key, o in self.options.items()}
        order = sum(abs(e - g % self.q) * literal for (g, e, _), literal in self.y.items())
        slabs = self._total({key: o.slabs for key, o in self.options.items()})
        last = [Objective("slabs a class", slabs), Objective("engine order", order)]
        if self.rent_s is not None:
            rented = {key: micro[key] + round(o.buffer_bytes * self.rent_s * 1e6) for key, o in self.options.items()}
            return [Objective("layout and rent seconds", self._total(rented), 1e-6), *last]
        kib = self._total({key: o.buffer_bytes >> 10 for key, o in self.options.items()})
        return [Objective("buffer bytes", kib, 1024), Objective("layout seconds", self._total(micro), 1e-6), *last]

    def _total(self, value: Mapping[tuple[str, str], int]) -> cp_model.LinearExprT:
        return sum(n * self.x[key] for key, n in value.items())


def one_option(m: Model) -> None:
    """(1)."""
    for c in m.classes:
        m.cp.add_exactly_one(m.x[c.name, o.view] for o in c.options)


def one_rank_a_gpu(m: Model) -> None:
    """(2)."""
    for g in range(m.tp_t):
        m.cp.add_exactly_one(m.y[g, e, r] for e, r in m.slots)


def one_gpu_a_rank(m: Model) -> None:
    """(3)."""
    for e, r in m.slots:
        m.cp.add_exactly_one(m.y[g, e, r] for g in range(m.tp_t))


def slab_in_shard(m: Model) -> None:
    """(4)."""
    for (g, _, r), literal in m.y.items():
        if r != g // m.q:
            m.cp.add(literal == 0)


FAMILIES: tuple[Family[Model], ...] = (
    Family(1, "one option a class", one_option),
    Family(2, "one rank a GPU", one_rank_a_gpu),
    Family(3, "one GPU a rank", one_gpu_a_rank),
    Family(4, "slabs lie in their rank's shard", slab_in_shard),
)


def decide(job: Job, order: LayoutOrder) -> Decision:
    """Solve the layout of the job's actor under a row order."""
    rent_s = LayoutCosts(job).rent_s_per_byte if order == "auto" else None
    model = constrain(Model(Options(job, order).classes(), job.train_tp, job.rollout_tp, rent_s), FAMILIES)
    solution = minimise(model.cp, "layout", model.objectives(), seconds=job.solver.seconds, seed=job.solver.seed)
    if solution is None:
        raise PassError("no placement of training and rollout ranks shares a slab on every GPU")
    chosen = {c.name: next(o for o in c.options if solution.true(model.x[c.name, o.view])) for c in model.classes}
    return Decision(tuple(model.classes), chosen, _placement(model, solution), solution.results)


def _placement(m: Model, solution: Solution) -> dict[str, tuple[int, ...]]:
    return {
        f"engine {e}": tuple(g for r in range(m.tp_r) for g in range(m.tp_t) if solution.true(m.y[g, e, r]))
        for e in range(m.q)
    }


def layout_of(job: Job) -> Layout:
    """The layout of a job's actor, and what other row orders would give."""
    if not job.shares_weights or job.train_tp % job.rollout_tp:
        return Layout(nothing_shared(job), ())
    found = decide(job, job.layout.order)
    others: dict[LayoutOrder, Decision] = {o: decide(job, o) for o in FIXED_ORDERS if o != job.layout.order}
    return Layout(summarise(job, found, others), found.solvers)


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
        return module.put(layout_of(module.job))
