"""What the residency model is about, as numbers: pages, places, microseconds, read off the job and its objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from rollplex.ir.job import Job
from rollplex.ir.module import Module
from rollplex.ir.plan import Residency as Place
from rollplex.ir.work import turn_work
from rollplex.passes.costs import Costs
from rollplex.passes.layout import Layout
from rollplex.passes.leaving import leaving
from rollplex.passes.schedule import Schedule
from rollplex.passes.state import START, Lifetimes, StateObject
from rollplex.passes.timeline import Added, Timeline, window_seconds

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
class Stretch:
    """A stretch k: its windows, and the microseconds of transfer that hide in them."""

    windows: tuple[str, ...]
    slack_us: int = 0


@dataclass(frozen=True)
class Data:
    """Sets and numbers of the maths; capacities in units, `compute_us` is g[w]."""

    windows: tuple[str, ...]
    items: tuple[Item, ...]
    capacity: int
    host_capacity: int
    stretches: tuple[Stretch, ...]
    compute_us: dict[str, int]

    @property
    def pools(self) -> tuple[str, ...]:
        """Every pool p that an object lies on."""
        return tuple(dict.fromkeys(o.pool for o in self.items))


def gather(module: Module) -> Data:
    """The data of a module that knows its schedule and lifetimes."""
    added = Added.of(module.job, module[Layout].summary)
    return data_of(module.job, module[Schedule], module[Lifetimes], added)


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
    )


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
    return (round(found.exposed_s * 1e6), [w for w, how in o.uses.items() if how == "hbm"][-1]) if found else (0, "")


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
