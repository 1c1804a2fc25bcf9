"""Where every object is in every window: HBM, the pinned host pool, or dropped (paper section 3.2).

Data        o, w     object, window (cyclic: the iteration's last window precedes its first)
            b[o]     bytes a GPU             C, H     capacity of HBM and of a GPU's share of the pinned pool
            A[o]     windows in which o exists        N[o]   windows that need all of o in HBM
            S[o]     windows that touch o piece by piece over the link unless it is in HBM
            F[o]     places o may be in where it is not needed           t(.)  seconds of a transfer or a recomputation
            k        a stretch: all overlapped windows of phase P1 together, every other window alone
            slack[k] seconds of transfer that hide in it: the decode tail that the prefixes leave over
Variables   h, c, d[o,w]   o is in HBM / at the host / dropped in w          over[w], short[w]  bytes over C and H
            up, down[o,w]  o moves host -> HBM / HBM -> host before w        e[k]   exposed seconds      P   peak bytes
Constraints (1)  h + c + d = 1                                 o, w in A[o]
            (2)  h[o,w] = 1                                    w in N[o]; a place outside F[o] is 0 elsewhere
            (3)  place[o,w] = place[o,w']                      w, w' in A[o], o recomputable: one place for its life
            (4)  sum_o b[o] h[o,w] <= C + over[w]              capacity of HBM
            (5)  sum_o b[o] (c[o,w] or host-backed) <= H + short[w]            capacity of the pinned pool
            (6)  up[o,w] >= h[o,w] - h[o,w-1]                  w-1, w in A[o]
            (7)  down[o,w] >= h[o,w-1] - h[o,w]                w-1, w in A[o], o not host-backed
            (8)  e[k] + slack[k] >= sum_{o, w in k} t(up) up + t(down) down + t(stream) c + t(recompute) d
            (9)  P >= sum_o b[o] h[o,w]
Objective   bytes over capacity, then exposed time, then peak, then bytes moved. Anything over capacity is infeasible.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ortools.sat.python import cp_model

from rollplex.ir.job import Job
from rollplex.ir.module import Module
from rollplex.ir.plan import Residency as Place
from rollplex.ir.plan import SolverResult
from rollplex.passes.costs import Costs
from rollplex.passes.schedule import Schedule
from rollplex.passes.solver import Objective, Solution, minimise
from rollplex.passes.state import Lifetimes, StateObject
from rollplex.passes.timeline import Timeline, window_seconds
from rollplex.passes.work import role_work

UNIT = 4096
"""Bytes are counted in pages of 4 KiB inside the model."""


@dataclass(frozen=True)
class Residency:
    """Where every object is; bytes over capacity by window (empty when it fits), exposed seconds by stretch."""

    made_by: ClassVar[str] = "residency"
    places: dict[str, dict[str, Place]]
    over_hbm: dict[str, int]
    over_host: dict[str, int]
    moved_bytes: int
    exposed: dict[str, float]
    solvers: tuple[SolverResult, ...]

    @property
    def exposed_s(self) -> float:
        """Seconds of transfers and recomputation that nothing hides, over the iteration."""
        return sum(self.exposed.values())

    def place(self, name: str, window: str) -> Place:
        """Where the object is in the window; `-` when it does not exist."""
        return self.places[name].get(window, "-")

    def __str__(self) -> str:
        return "\n".join(f"{name:<24} {' '.join(p.values())}" for name, p in self.places.items())


@dataclass(frozen=True)
class Data:
    """Sets and numbers of the docstring."""

    job: Job
    schedule: Schedule
    lifetimes: Lifetimes

    @cached_property
    def windows(self) -> tuple[str, ...]:
        """All windows in order."""
        return self.schedule.names()

    @cached_property
    def alive(self) -> dict[str, tuple[str, ...]]:
        """A[o]."""
        return {o.name: o.alive(self.windows) for o in self.lifetimes.objects}

    def needed(self, o: StateObject, window: str) -> bool:
        """w in N[o]; an object without a choice is in HBM whenever it exists."""
        return o.always or not o.options or o.uses.get(window) == "hbm"

    def allowed(self, o: StateObject, window: str) -> frozenset[Place]:
        """F[o] in this window."""
        return frozenset({"hbm"}) if self.needed(o, window) else o.options

    def before(self, o: StateObject, window: str) -> str | None:
        """The window before, if the object exists in both (cyclic for what exists all the time)."""
        alive = self.alive[o.name]
        index = alive.index(window)
        if index:
            return alive[index - 1]
        return alive[-1] if len(alive) == len(self.windows) > 1 else None

    @property
    def host_share(self) -> int:
        """H: the pinned pool of a node over its GPUs."""
        return self.job.host_pool_bytes // self.job.cluster.gpus_per_node

    @cached_property
    def timeline(self) -> Timeline:
        """Seconds of compute by window."""
        return window_seconds(self.job, self.schedule)

    @cached_property
    def stretches(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """Every k as its windows and slack[k] in microseconds."""
        if self.schedule.kind == "serial":
            return tuple(((w,), 0) for w in self.windows)
        together = self.schedule.decode_windows
        alone = (((w,), 0) for w in self.windows if w not in together)
        return ((together, round(self.timeline.idle_s * 1e6)), *alone)

    def stream_us(self, o: StateObject, window: str) -> int:
        """Exposed time of touching o over the link in this window, beyond what its compute hides."""
        if o.uses.get(window) != "stream":
            return 0
        costs = Costs(self.job)
        hidden = self.timeline.compute[window] if o.recomputable else 0.0
        return round(max(0.0, costs.link_s(o.nbytes) - hidden) * 1e6)

    def recompute_us(self, o: StateObject, window: str) -> int:
        """Time of making a dropped object again, charged to its last use."""
        if not o.recomputable or window != self.alive[o.name][-1]:
            return 0
        return round(Costs(self.job).prefix_s(role_work(self.job, o.role), self.job.prompts_per_rank) * 1e6)

    def link_us(self, o: StateObject) -> int:
        """Moving all of o one way."""
        return round(Costs(self.job).link_s(o.nbytes) * 1e6)


class Model:
    """The CP-SAT model of the docstring; `add_constraints` is its table of contents."""

    def __init__(self, data: Data) -> None:
        self.data, self.cp = data, cp_model.CpModel()
        pairs = [(o, w) for o in data.lifetimes.objects for w in data.alive[o.name]]
        places: tuple[Place, ...] = ("hbm", "host", "dropped")
        self.at: dict[tuple[str, str, Place], cp_model.IntVar] = {
            (o.name, w, p): self.cp.new_bool_var(f"{p}[{o.name},{w}]") for o, w in pairs for p in places
        }
        self.up = {(o.name, w): self.cp.new_bool_var(f"up[{o.name},{w}]") for o, w in pairs}
        self.down = {(o.name, w): self.cp.new_bool_var(f"down[{o.name},{w}]") for o, w in pairs}
        total = sum(o.nbytes for o in data.lifetimes.objects) // UNIT + 1
        self.over = {w: self.cp.new_int_var(0, total, f"over[{w}]") for w in data.windows}
        self.short = {w: self.cp.new_int_var(0, total, f"short[{w}]") for w in data.windows}
        self.exposed = [self.cp.new_int_var(0, 10**12, f"e[{k}]") for k in range(len(data.stretches))]
        self.peak = self.cp.new_int_var(0, total, "P")

    def add_constraints(self) -> None:
        """Families (1) to (9)."""
        self._one_place()
        self._dropped_stays_dropped()
        self._hbm_capacity_and_peak()
        self._host_capacity()
        self._moves()
        self._exposure()

    def _one_place(self) -> None:
        """(1) and (2)."""
        for o in self.data.lifetimes.objects:
            for w in self.data.alive[o.name]:
                allowed = self.data.allowed(o, w)
                self.cp.add_exactly_one(self.at[o.name, w, p] for p in ("hbm", "host", "dropped"))
                for p in ("hbm", "host", "dropped"):
                    if p not in allowed:
                        self.cp.add(self.at[o.name, w, p] == 0)

    def _dropped_stays_dropped(self) -> None:
        """(3), and a saved state that streams keeps one place for its whole life."""
        for o in self.data.lifetimes.objects:
            if not o.recomputable:
                continue
            first, *rest = self.data.alive[o.name]
            for w in rest:
                for p in ("hbm", "host", "dropped"):
                    self.cp.add(self.at[o.name, w, p] == self.at[o.name, first, p])

    def hbm(self, window: str) -> cp_model.LinearExprT:
        """Units in HBM in a window."""
        objects = self.data.lifetimes.objects
        return sum(
            o.nbytes // UNIT * self.at[o.name, window, "hbm"] for o in objects if (o.name, window, "hbm") in self.at
        )

    def _hbm_capacity_and_peak(self) -> None:
        """(4) and (9)."""
        for w in self.data.windows:
            self.cp.add(self.hbm(w) <= self.data.job.capacity_bytes // UNIT + self.over[w])
            self.cp.add(self.peak >= self.hbm(w))

    def _host_capacity(self) -> None:
        """(5)."""
        backed = sum(o.nbytes for o in self.data.lifetimes.objects if o.host_backed)
        for w in self.data.windows:
            held = sum(
                o.nbytes // UNIT * self.at[o.name, w, "host"]
                for o in self.data.lifetimes.objects
                if not o.host_backed and (o.name, w, "host") in self.at
            )
            self.cp.add(held + backed // UNIT <= self.data.host_share // UNIT + self.short[w])

    def _moves(self) -> None:
        """(6) and (7)."""
        for o in self.data.lifetimes.objects:
            for w in self.data.alive[o.name]:
                if (before := self.data.before(o, w)) is None or o.recomputable:
                    continue
                here, there = self.at[o.name, w, "hbm"], self.at[o.name, before, "hbm"]
                self.cp.add(self.up[o.name, w] >= here - there)
                if not o.host_backed:
                    self.cp.add(self.down[o.name, w] >= there - here)

    def _exposure(self) -> None:
        """(8)."""
        for exposed, (windows, slack) in zip(self.exposed, self.data.stretches, strict=True):
            self.cp.add(exposed + slack >= sum(term for w in windows for term in self._seconds(w)))

    def _seconds(self, w: str) -> list[cp_model.LinearExprT]:
        """Microseconds of transfers and recomputation that stand in a window, hidden or not."""
        terms: list[cp_model.LinearExprT] = []
        for o in self.data.lifetimes.objects:
            if w in self.data.alive[o.name]:
                terms.append(self.data.link_us(o) * (self.up[o.name, w] + self.down[o.name, w]))
                terms.append(self.data.stream_us(o, w) * self.at[o.name, w, "host"])
                terms.append(self.data.recompute_us(o, w) * self.at[o.name, w, "dropped"])
        return terms

    def objectives(self) -> list[Objective]:
        """Over capacity first: a plan that does not fit has no time."""
        moved = [
            o.nbytes // UNIT * (self.up[o.name, w] + self.down[o.name, w])
            for o in self.data.lifetimes.objects
            for w in self.data.alive[o.name]
        ]
        streams = [
            o.nbytes // UNIT * self.at[o.name, w, "host"]
            for o in self.data.lifetimes.objects
            for w in self.data.alive[o.name]
            if o.uses.get(w) == "stream"
        ]
        over = sum(self.over.values()) + sum(self.short.values())
        return [
            Objective("bytes over capacity", over, UNIT),
            Objective("exposed seconds", sum(self.exposed), 1e-6),
            Objective("peak bytes", self.peak, UNIT),
            Objective("bytes moved", sum(moved) + sum(streams), UNIT),
        ]


def read(model: Model, solution: Solution) -> Residency:
    """The solution as places, shortfalls and totals."""
    places: dict[str, dict[str, Place]] = {o.name: {} for o in model.data.lifetimes.objects}
    for (name, window, place), literal in model.at.items():
        if solution.true(literal):
            places[name][window] = place
    over = {w: solution.value(v) * UNIT for w, v in model.over.items() if solution.value(v)}
    short = {w: solution.value(v) * UNIT for w, v in model.short.items() if solution.value(v)}
    moved = next(r.value for r in solution.results if r.objective == "bytes moved")
    late = zip(model.exposed, model.data.stretches, strict=True)
    exposed = {windows[-1]: solution.value(e) * 1e-6 for e, (windows, _) in late}
    return Residency(places, over, short, int(moved), exposed, solution.results)


@dataclass(frozen=True)
class ResidencyPass:
    """Solve HBM, host or dropped for every object and window under both capacities (CP-SAT)."""

    name: ClassVar[str] = "residency"
    makes: ClassVar[type] = Residency

    def run(self, module: Module) -> Module:
        """Solve; a schedule over capacity is returned as such, for the plan to explain."""
        job = module.job
        model = Model(Data(job, module[Schedule], module[Lifetimes]))
        model.add_constraints()
        solution = minimise(model.cp, self.name, model.objectives(), seconds=job.solver.seconds, seed=job.solver.seed)
        assert solution is not None, "over[w] and short[w] make every job solvable"
        return module.put(read(model, solution))
