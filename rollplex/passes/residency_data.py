"""What the residency model is about, as numbers: pages, places, microseconds, read off the job and its objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from rollplex.ir.job import Job
from rollplex.ir.module import Module
from rollplex.ir.plan import Residency as Place
from rollplex.ir.work import turn_work
from rollplex.passes.costs import Costs
from rollplex.passes.layout import Layout
from rollplex.passes.leaving import leaving
from rollplex.passes.releasing import Choice, Cuts, moments, rewritten
from rollplex.passes.schedule import Schedule
from rollplex.passes.state import START, HeldSizes, Lifetimes, StateObject
from rollplex.passes.timeline import Added, Timeline, window_seconds
from rollplex.passes.update_sizes import ALIGN, reserved_elements
from rollplex.passes.work import updated_parameters

PLACES: tuple[Place, ...] = ("hbm", "host", "dropped")
UNIT = 4096
"""Bytes are counted in pages of 4 KiB inside the model."""


@dataclass(frozen=True)
class Item:
    """An object o of the maths: b, A and F in `units`, `places`; p of o in `pool`; S and t(.) in microseconds.

    f(o) is `final`, empty for what leaves as a whole; r(o) is `early_us`.
    """

    name: str
    units: int
    places: dict[str, frozenset[Place]]
    pool: str = ""
    cyclic: bool = False
    host_backed: bool = False
    recomputable: bool = False
    streams: frozenset[str] = frozenset()
    link_us: int = 0
    recompute_us: int = 0
    final: str = ""
    early_us: int = 0

    @property
    def leaves(self) -> str | None:
        """The window behind f(o): it may leave in pieces before that one."""
        behind = self.alive[self.alive.index(self.final) + 1 :] if self.final else ()
        return next(iter(behind), None)

    @property
    def alive(self) -> tuple[str, ...]:
        """A[o], in order."""
        return tuple(self.places)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """(w-1, w) for every window of A[o] with one before it."""
        alive = self.alive
        yield from pairwise(alive)
        if self.cyclic and len(alive) > 1:
            yield alive[-1], alive[0]


@dataclass(frozen=True)
class Size:
    """m `responses` a suffix step: L[m] in microseconds, W[m,v] in units, a(m,o,v) by saved state and workspace."""

    responses: int = 1
    late_us: int = 0
    units: dict[str, int] = field(default_factory=dict)
    again: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Units of all workspaces at most."""
        return sum(self.units.values()) + sum(n for sizes in self.again.values() for n in sizes.values())


@dataclass(frozen=True)
class Stretch:
    """A stretch k: its windows, and the microseconds of transfer that hide in them."""

    windows: tuple[str, ...]
    slack_us: int = 0


@dataclass(frozen=True)
class Data:
    """Sets and numbers of the maths; capacities in units, `compute_us` is g[w], `remap_us` q[w]."""

    windows: tuple[str, ...]
    items: tuple[Item, ...]
    capacity: int
    host_capacity: int
    stretches: tuple[Stretch, ...]
    compute_us: dict[str, int]
    moments: dict[str, tuple[dict[str, int], ...]] = field(default_factory=dict)
    remap_us: dict[str, int] = field(default_factory=dict)
    sizes: tuple[Size, ...] = (Size(),)

    @property
    def grown(self) -> tuple[str, ...]:
        """Every workspace v that may be larger than it is listed."""
        found = (v for size in self.sizes for names in (size.units, *size.again.values()) for v in names)
        return tuple(dict.fromkeys(found))

    def moments_of(self, window: str) -> tuple[dict[str, int], ...]:
        """M[w]: of each moment the units of what grows or shrinks; in other windows nothing does."""
        return self.moments.get(window, ({},))

    @property
    def pools(self) -> tuple[str, ...]:
        """Every pool p that an object lies on."""
        return tuple(dict.fromkeys(o.pool for o in self.items))


def gather(module: Module, snapshot: Choice = "keep") -> Data:
    """The data of a module that knows its schedule and lifetimes, where an update keeps or releases the snapshot."""
    added = Added.of(module.job, module[Layout].summary)
    data = data_of(module.job, module[Schedule], module[Lifetimes], added)
    return data if snapshot == "keep" else _released(module, data)


def _released(module: Module, data: Data) -> Data:
    """In the update two moments decide: the one that has most of snapshot and gradients, and the last.

    Chunks are as residency reserves them; gradients that are not in HBM count for nothing.
    """
    job, lifetimes = module.job, module[Lifetimes]
    (window,) = module[Schedule].names("update", role=job.policy)
    names = (f"{job.policy}.snapshot", f"{job.policy}.gradients")
    nbytes = [lifetimes[name].nbytes for name in names]
    elements = reserved_elements(job, updated_parameters(job, job.policy), module[HeldSizes].chunk_elements)
    every = list(moments(rewritten(Cuts.of(job, *nbytes), -(-elements // ALIGN) * ALIGN), nbytes[1]))
    found = (max(every, key=lambda m: m.held(gradients=True)), every[-1])
    units = tuple({n: -(-b // UNIT) for n, b in zip(names, (m.snapshot, m.gradients), strict=True)} for m in found)
    remap = {window: round(Costs(job).remap_s(nbytes[0], max(0, job.q - 1)) * 1e6)}
    return replace(data, moments={window: units}, remap_us=remap)


def data_of(job: Job, schedule: Schedule, lifetimes: Lifetimes, added: Added) -> Data:
    """The data of these objects under a job."""
    timeline = window_seconds(job, schedule, added)
    return Data(
        windows=schedule.names(),
        items=tuple(_item(job, schedule.names(), o) for o in lifetimes.objects),
        capacity=job.capacity_bytes // UNIT,
        host_capacity=job.host_pool_bytes // job.cluster.gpus_per_node // UNIT,
        stretches=_stretches(schedule, timeline),
        compute_us={w: round(seconds * 1e6) for w, seconds in timeline.compute.items()},
        sizes=_sizes(job, schedule, lifetimes, added) or (Size(),),
    )


def _sizes(job: Job, schedule: Schedule, lifetimes: Lifetimes, added: Added) -> tuple[Size, ...]:
    post = {c.responses: window_seconds(job, schedule, added, c.responses).post_s for c in lifetimes.choices}
    return tuple(
        Size(
            responses=c.responses,
            late_us=round((post[c.responses] - min(post.values())) * 1e6),
            units=_units(c.nbytes),
            again={saved: _units(sizes) for saved, sizes in c.again.items()},
        )
        for c in lifetimes.choices
    )


def _units(nbytes: dict[str, int]) -> dict[str, int]:
    return {name: -(-n // UNIT) for name, n in nbytes.items()}


def _item(job: Job, windows: tuple[str, ...], o: StateObject) -> Item:
    assert "dropped" not in o.options or o.recomputable, f"{o.name} may be dropped, but nothing makes it again"
    alive, costs = o.alive(windows), Costs(job)
    early, final = _early(job, o)
    remake = costs.prefix_s(turn_work(job, o.role, o.turn), job.prompts_of(o.role)) if o.recomputable else 0.0
    return Item(
        name=o.name,
        units=-(-o.nbytes // UNIT),
        places={w: _places(o, w) for w in alive},
        pool=job.pool(o.process),
        cyclic=o.always or o.produced == START,
        host_backed=o.host_backed,
        recomputable=o.recomputable,
        streams=frozenset(w for w, how in o.uses.items() if how == "stream"),
        link_us=round(costs.link_s(o.nbytes) * 1e6),
        recompute_us=round(remake * 1e6),
        final=final,
        early_us=early,
    )


def _early(job: Job, o: StateObject) -> tuple[int, str]:
    """Microseconds that are left when it leaves beside the backward that ends it, and the window of that."""
    found = leaving(job, o.role, o.nbytes) if o.by_layer and "host" in o.options else None
    return (round(found.exposed_s * 1e6), o.final) if found else (0, "")


def _places(o: StateObject, window: str) -> frozenset[Place]:
    """F[o,w]; an object without a choice is in HBM whenever it exists."""
    needed = o.always or not o.options or o.uses.get(window) == "hbm"
    return frozenset({"hbm"}) if needed else o.options


def _stretches(schedule: Schedule, timeline: Timeline) -> tuple[Stretch, ...]:
    if not schedule.overlapped:
        free = timeline.window if any(timeline.free_s) else {}  # the trainer's GPUs are free while others decode
        idle = {w: round(free.get(w, 0.0) * 1e6) for w in schedule.names("decode")}
        return tuple(Stretch((w,), idle.get(w, 0)) for w in schedule.names())
    turns = zip(schedule.turns, timeline.free_s, strict=True)
    alone = (Stretch((w,)) for w in schedule.names() if w not in schedule.decode_windows)
    return (*(Stretch(schedule.turn_windows(t), round(free * 1e6)) for t, free in turns), *alone)
