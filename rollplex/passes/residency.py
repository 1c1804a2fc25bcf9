"""Where every object is in every window: HBM, the pinned host pool, or dropped (paper section 3.2).

Data        o, w     object, window              w-1      the window of A[o] before w; where o is there from the start
            A[o]     windows in which o exists            the iteration's last window comes before its first
            F[o,w]   places that o may be in: {hbm} where all of it is needed at once
            S[o]     windows that touch o piece by piece over the link unless it is in HBM
            b[o]     bytes a GPU                 p        a pool of GPUs; o in p: a process on its GPUs owns o
            C, H     capacity of HBM and of a GPU's share of the pinned pool
            t(.)     seconds of a transfer or a recomputation
            f(o)     the window whose work makes o final layer by layer, for gradients; n(o) the window behind it
            r(o)     seconds of t(o) that are left if o leaves in pieces beside that work (leaving.py)
            g[w]     seconds of compute of w, behind which saved states (recomputable objects) stream
            M[w]     moments of w: of the update, if it makes a released snapshot again, those at which most is there;
                     b[o,m] bytes of o then (releasing.py); q[w] seconds that its pages take to go and come
            m        responses of a group that a suffix step takes, a divisor of it; L[m] seconds that all suffix steps
                     take longer than with the best m: each takes as long as its launches at least (Costs)
            W[m,v] bytes of a suffix workspace v then, at least b[v]; a(m,o,v) with room to make a saved state o again
            k        a stretch: all overlapped windows of a turn of phase P1 together, every other window alone
            slack[k] seconds of transfer that hide in it: the decode tail that the prefixes leave over, or all of decode
                     where rollout has GPUs of its own; between turns the environment's too
Variables   h, c, d[o,w]   o is in HBM / at the host / dropped in w      over[p,w], short[p,w]  bytes over C and H
            up, down[o,w]  o moves host -> HBM / HBM -> host before w        V      the most bytes over a capacity
            z[o]           o leaves in pieces, in f(o)
            x[m]           m responses a suffix step
            G[v]           bytes that v has beyond b[v], for larger steps or to make again what is dropped; v alone
            s[w]           seconds by which saved states outlast the compute of w
            e[k]           exposed seconds                                   P      peak bytes
            T              peak bytes within the last tenth of C
Constraints (1)  h + c + d = 1                                 w in A[o]
            (2)  place[o,w] = 0                                w in A[o], place not in F[o,w]
            (3)  place[o,w] = place[o,w-1]                     o recomputable: one place for its life
            (4)  sum_{o in p} (b[o,m] h[o,w] + G[o]) <= C + over[p,w]   m in M[w]  capacity of HBM
            (5)  sum_{o in p} b[o] (c[o,w] or host-backed, + z[o] if w = f(o)) <= H + short[p,w]
                                                                                    capacity of the pinned pool
            (6)  up[o,w] >= h[o,w] - h[o,w-1]                  o not recomputable
            (7)  down[o,w] >= h[o,w-1] - h[o,w]                o not recomputable, not host-backed
            (8)  s[w] + g[w] >= sum_o t(o) c[o,w]              w in S[o], o recomputable
            (9)  e[k] + slack[k] >= sum_{w in k} s[w] + sum_o t(o) (up + down + c if w in S[o]) + t(recompute) d[o,last]
                                                               + q[w], less (t(o) - r(o)) z[o] in n(o);
                                                               a saved state's c is in s already
            (10) P >= sum_{o in p} (b[o,m] h[o,w] + G[o])      m in M[w]
            (11) V >= over[p,w],  V >= short[p,w]
            (12) z[o] <= down[o,n(o)]
            (13) T >= P - 9/10 C
            (14) G[v] >= a(m,o,v) - b[v]  if x[m] and d[o,w]   w in A[o], o recomputable
            (15) sum_m x[m] = 1
            (16) G[v] >= sum_m (W[m,v] - b[v]) x[m]
Objective   V, bytes over capacity in all windows, exposed time and L[m] together, T, bytes moved, peak. V > 0 is
            infeasible; then C + V is the least capacity that would do, and the second objective keeps the other windows
            as they must be. Steps as large as x says have room; chunk_sizes.py takes the largest that have.
            What fits with a tenth to spare does not move; closer to C room is worth more than a quiet link.
Transfers of one stretch are added up, though the link is duplex: exposed time is never told too small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ortools.sat.python import cp_model

from rollplex.ir.module import Module
from rollplex.ir.plan import Residency as Place
from rollplex.ir.plan import SolverResult
from rollplex.passes.layout import Layout
from rollplex.passes.releasing import Choice, choices
from rollplex.passes.residency_data import PLACES, UNIT, Data, Item, gather
from rollplex.passes.residency_steps import larger_steps, made_again, one_step
from rollplex.passes.schedule import Schedule
from rollplex.passes.solver import Family, Objective, Solution, constrain, minimise
from rollplex.passes.state import HeldSizes, Lifetimes

LONGEST_US = 10**12


@dataclass(frozen=True)
class Residency:
    """Where every object is; bytes over capacity by window (empty when it fits), exposed seconds by stretch.

    `in_pieces` are the objects that leave HBM beside the backward that makes them final. `released` says whether the
    update makes the snapshot again chunk by chunk, on new pages; gradients that are in HBM then leave behind each.
    """

    made_by: ClassVar[str] = "residency"
    places: dict[str, dict[str, Place]]
    over_hbm: dict[str, int]
    over_host: dict[str, int]
    moved_bytes: int
    exposed: dict[str, float]
    solvers: tuple[SolverResult, ...]
    in_pieces: frozenset[str] = frozenset()
    released: bool = False

    @property
    def fits(self) -> bool:
        """Whether no capacity is exceeded."""
        return not (self.over_hbm or self.over_host)

    @property
    def exposed_s(self) -> float:
        """Seconds of transfers and recomputation that nothing hides, over the iteration."""
        return sum(self.exposed.values())

    def place(self, name: str, window: str) -> Place:
        """Where the object is in the window; `-` when it does not exist."""
        return self.places[name].get(window, "-")

    def __str__(self) -> str:
        return "\n".join(f"{name:<24} {' '.join(p.values())}" for name, p in self.places.items())


class Model:
    """The variables of the docstring; `FAMILIES` are its constraints."""

    def __init__(self, data: Data) -> None:
        self.data, self.cp = data, cp_model.CpModel()
        pairs = [(o.name, w) for o in data.items for w in o.alive]
        total = sum(o.units for o in data.items) + sum(size.most for size in data.sizes)
        self.at: dict[tuple[str, str, Place], cp_model.IntVar] = {
            (o, w, p): self.cp.new_bool_var(f"{p}[{o},{w}]") for o, w in pairs for p in PLACES
        }
        self.up = {(o, w): self.cp.new_bool_var(f"up[{o},{w}]") for o, w in pairs}
        self.down = {(o, w): self.cp.new_bool_var(f"down[{o},{w}]") for o, w in pairs}
        self.step = {size.responses: self.cp.new_bool_var(f"x[{size.responses}]") for size in data.sizes}
        self.grown = {v: self.cp.new_int_var(0, total, f"G[{v}]") for v in data.grown}
        self.in_pieces = {o.name: self.cp.new_bool_var(f"z[{o.name}]") for o in data.items if o.leaves}
        spots = list(itertools.product(data.pools, data.windows))
        self.over = {(p, w): self.cp.new_int_var(0, total, f"over[{p},{w}]") for p, w in spots}
        self.short = {(p, w): self.cp.new_int_var(0, total, f"short[{p},{w}]") for p, w in spots}
        self.late = {w: self.cp.new_int_var(0, LONGEST_US, f"s[{w}]") for w in data.windows}
        self.exposed = [self.cp.new_int_var(0, LONGEST_US, f"e[{k}]") for k in range(len(data.stretches))]
        self.peak = self.cp.new_int_var(0, total, "P")
        self.near = self.cp.new_int_var(0, total, "T")
        self.most_over = self.cp.new_int_var(0, total, "V")

    def hbm(self, pool: str, window: str) -> Iterator[cp_model.LinearExprT]:
        """Units in HBM of a GPU of the pool at each moment of a window."""
        here = [o for o in self.data.items if o.pool == pool and window in o.places]
        more = sum(self.grown[o.name] for o in here if o.name in self.grown)
        for then in self.data.moments_of(window):
            yield sum(then.get(o.name, o.units) * self.at[o.name, window, "hbm"] for o in here) + more

    def moves(self, o: Item, window: str) -> cp_model.LinearExprT:
        """How often o crosses the link before or in a window, as a whole."""
        streamed = self.at[o.name, window, "host"] if window in o.streams else 0
        return self.up[o.name, window] + self.down[o.name, window] + streamed

    def leaving(self, o: Item, window: str) -> cp_model.LinearExprT:
        """Whether o leaves in pieces in a window: it is in HBM and at the host then."""
        return self.in_pieces[o.name] if o.leaves and window == o.final else 0

    def objectives(self) -> list[Objective]:
        """In order: a plan that does not fit has no time."""
        moved = sum(o.units * self.moves(o, w) for o in self.data.items for w in o.alive)
        over = sum(self.over.values()) + sum(self.short.values())
        lost = sum(self.exposed) + sum(size.late_us * self.step[size.responses] for size in self.data.sizes)
        return [
            Objective("bytes over capacity", self.most_over, UNIT),
            Objective("bytes over in all windows", over, UNIT),
            Objective("seconds lost", lost, 1e-6),
            Objective("bytes in the last tenth", self.near, UNIT),
            Objective("bytes moved", moved, UNIT),
            Objective("peak bytes", self.peak, UNIT),
        ]


# ---- constraint families


def one_place(m: Model) -> None:
    """(1)."""
    for o in m.data.items:
        for w in o.alive:
            m.cp.add_exactly_one(m.at[o.name, w, p] for p in PLACES)


def legal_places(m: Model) -> None:
    """(2)."""
    for o in m.data.items:
        for w, p in itertools.product(o.alive, PLACES):
            if p not in o.places[w]:
                m.cp.add(m.at[o.name, w, p] == 0)


def kept_for_life(m: Model) -> None:
    """(3)."""
    for o in (o for o in m.data.items if o.recomputable):
        for before, w in o.pairs():
            for p in PLACES:
                m.cp.add(m.at[o.name, w, p] == m.at[o.name, before, p])


def hbm_capacity(m: Model) -> None:
    """(4)."""
    for (p, w), over in m.over.items():
        for held in m.hbm(p, w):
            m.cp.add(held <= m.data.capacity + over)


def host_capacity(m: Model) -> None:
    """(5); what is host-backed is in the pool wherever else it is."""
    for (p, w), short in m.short.items():
        backed = sum(o.units for o in m.data.items if o.host_backed and o.pool == p)
        others = (o for o in m.data.items if not o.host_backed and o.pool == p and w in o.places)
        terms = (o.units * at for o in others for at in (m.at[o.name, w, "host"], m.leaving(o, w)))
        m.cp.add(sum(terms) + backed <= m.data.host_capacity + short)


def fetches(m: Model) -> None:
    """(6)."""
    for o in (o for o in m.data.items if not o.recomputable):
        for before, w in o.pairs():
            m.cp.add(m.up[o.name, w] >= m.at[o.name, w, "hbm"] - m.at[o.name, before, "hbm"])


def offloads(m: Model) -> None:
    """(7)."""
    for o in (o for o in m.data.items if not (o.recomputable or o.host_backed)):
        for before, w in o.pairs():
            m.cp.add(m.down[o.name, w] >= m.at[o.name, before, "hbm"] - m.at[o.name, w, "hbm"])


def saved_streams(m: Model) -> None:
    """(8); all saved states of a window share its compute."""
    for w in m.data.windows:
        saved = (o for o in m.data.items if o.recomputable and w in o.streams)
        m.cp.add(m.late[w] + m.data.compute_us[w] >= sum(o.link_us * m.at[o.name, w, "host"] for o in saved))


def exposure(m: Model) -> None:
    """(9)."""
    for exposed, k in zip(m.exposed, m.data.stretches, strict=True):
        m.cp.add(exposed + k.slack_us >= sum(term for w in k.windows for term in _spent(m, w)))


def _spent(m: Model, w: str) -> Iterator[cp_model.LinearExprT]:
    """Microseconds of transfers and recomputation that stand in a window, hidden or not."""
    yield m.late[w]
    yield m.data.remap_us.get(w, 0)
    for o in (o for o in m.data.items if w in o.places):
        if not o.recomputable:
            yield o.link_us * m.moves(o, w)
            if w == o.leaves:
                yield (o.early_us - o.link_us) * m.in_pieces[o.name]
        elif w == o.alive[-1]:
            yield o.recompute_us * m.at[o.name, w, "dropped"]


def peak(m: Model) -> None:
    """(10)."""
    for p, w in m.over:
        for held in m.hbm(p, w):
            m.cp.add(m.peak >= held)


def near_capacity(m: Model) -> None:
    """(13); a tenth of the capacity is to spare."""
    m.cp.add(m.near >= m.peak - (m.data.capacity - m.data.capacity // 10))


def most_over(m: Model) -> None:
    """(11)."""
    for over in (*m.over.values(), *m.short.values()):
        m.cp.add(m.most_over >= over)


def leaving_in_pieces(m: Model) -> None:
    """(12)."""
    for o in m.data.items:
        if o.leaves:
            m.cp.add(m.in_pieces[o.name] <= m.down[o.name, o.leaves])


FAMILIES: tuple[Family[Model], ...] = (
    Family(1, "every object is in one place", one_place),
    Family(2, "needed objects are in HBM, others where they may be", legal_places),
    Family(3, "a saved state keeps its place", kept_for_life),
    Family(4, "capacity of HBM", hbm_capacity),
    Family(5, "capacity of the pinned pool", host_capacity),
    Family(6, "fetches", fetches),
    Family(7, "offloads", offloads),
    Family(8, "saved states stream behind compute", saved_streams),
    Family(9, "exposed seconds", exposure),
    Family(10, "peak", peak),
    Family(11, "the most bytes over a capacity", most_over),
    Family(12, "what leaves in pieces leaves", leaving_in_pieces),
    Family(13, "room close to capacity", near_capacity),
    Family(14, "room to make again what is dropped", made_again),
    Family(15, "one size of suffix step", one_step),
    Family(16, "room for larger suffix steps", larger_steps),
)


# ---- the pass


def lacking(solution: Solution, over: dict[tuple[str, str], cp_model.IntVar]) -> dict[str, int]:
    """Bytes over a capacity by window, of the pool that lacks most; windows that fit are left out."""
    found: dict[str, int] = {}
    for (_, window), variable in over.items():
        if (nbytes := solution.value(variable) * UNIT) > found.get(window, 0):
            found[window] = nbytes
    return found


def read(model: Model, solution: Solution) -> Residency:
    """The solution as places, shortfalls and totals."""
    places: dict[str, dict[str, Place]] = {o.name: {} for o in model.data.items}
    for (name, window, place), literal in model.at.items():
        if solution.true(literal):
            places[name][window] = place
    over, short = lacking(solution, model.over), lacking(solution, model.short)
    moved = next(r.value for r in solution.results if r.objective == "bytes moved")
    late = zip(model.exposed, model.data.stretches, strict=True)
    exposed = {k.windows[-1]: solution.value(e) * 1e-6 for e, k in late}
    pieces = frozenset(name for name, literal in model.in_pieces.items() if solution.true(literal))
    released = bool(model.data.moments)
    return Residency(places, over, short, int(moved), exposed, solution.results, pieces, released)


@dataclass(frozen=True)
class ResidencyPass:
    """Solve HBM, host or dropped for every object and window under both capacities (CP-SAT).

    Where that does not fit, it is solved again for an update that makes a released snapshot again on new pages, if the
    job allows one: the cheaper that fits is taken.

    Job keys: `cluster.capacity_gib`, `cluster.host_memory_gb`, `cluster.pinned_share`, `optimizer.snapshot`, `solver`.
    """

    name: ClassVar[str] = "residency"
    needs: ClassVar[tuple[type, ...]] = (Schedule, Layout, HeldSizes, Lifetimes)
    makes: ClassVar[type] = Residency

    def run(self, module: Module) -> Module:
        """Solve; a schedule over capacity is returned as such, for the plan to explain."""
        cheapest, *others = choices(module.job)
        found = self._solve(module, cheapest)
        for choice in others if not found.fits else ():
            other = self._solve(module, choice)
            found = other if other.fits else found
        return module.put(found)

    def _solve(self, module: Module, snapshot: Choice) -> Residency:
        model, limits = constrain(Model(gather(module, snapshot)), FAMILIES), module.job.solver
        solution = minimise(model.cp, self.name, model.objectives(), seconds=limits.seconds, seed=limits.seed)
        assert solution is not None, "over[p,w] and short[p,w] make every job solvable"
        return read(model, solution)
