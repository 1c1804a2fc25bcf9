"""The planned objects of one process: arenas for what has bytes of its own, reservations for temporaries.

in an arena      weights, boundary, saved state, KV, gradients, master, moments
reserved only    workspaces and activations: torch allocates them, the ledger counts them, `measure` says how much
in the pool      what the plan gives a place in it: state for ever, the rest from its first put to its last use
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch

from rollplex.backends.base import Arena
from rollplex.backends.device import Device
from rollplex.backends.digest import digest
from rollplex.backends.memory.ledger import Event, Ledger, Mark
from rollplex.backends.memory.memfd import HostMemory
from rollplex.backends.memory.objects import ObjectStore, StoredObject
from rollplex.backends.memory.pinned import PinnedPool, Place
from rollplex.ir.plan import Plan, PlannedObject
from rollplex.ir.planned_pool import LASTING
from rollplex.ir.steps import MapPart, Run, Step, UnmapPart

_TEMPORARY = (
    "context", "prefix_workspace", "score_workspace", "activations", "runtime", "workspace", "optimizer_workspace",
)  # fmt: skip
IDLE = ""  # the window between two iterations


def is_temporary(name: str) -> bool:
    """Whether an object is a bound on what torch allocates in a window, not memory that we hand out."""
    parts = name.split(".")  # a later turn's has its number behind it
    return len(parts) > 1 and parts[1] in _TEMPORARY


def _stays(o: PlannedObject) -> bool:
    """Whether an object is there when an iteration starts, with values of its own."""
    return o.start in ("hbm", "host") and not is_temporary(o.name)


def _cuts(program: Iterable[Step]) -> dict[str, tuple[int, ...]]:
    """Where objects that come or go in parts are cut, for whoever maps them: pages of one cut are shared whole."""
    found: dict[str, tuple[int, ...]] = {}
    for step in program:
        parts = step.offloads if isinstance(step, Run) else [step] if isinstance(step, MapPart | UnmapPart) else []
        for part in parts:
            found[part.object] = (*found.get(part.object, ()), part.start, part.stop)
    return found


class PlannedObjects:
    """`Objects` of one process: executes residency steps, and gives tensors over what it holds."""

    def __init__(self, plan: Plan, kind: str, process: str, fds: Sequence[int], device: Device) -> None:
        """`fds` are the ledgers of the device and of the host; they are taken over."""
        self.device = device
        self.ledger = Ledger.attach(fds[0], process=process)
        self._host_ledger = Ledger.attach(fds[1], process=process)
        self._first = plan.summary.windows[0].name
        self.owned = {o.name: o for o in plan.summary.objects if o.process == kind}
        self.imported = {o.name: o for o in plan.summary.objects if kind in o.readers}
        self._store = ObjectStore(self.ledger, device)
        self.measuring = True
        self._reserved: set[str] = set()
        known = [*self.owned.values(), *self.imported.values()]
        self._cuts = _cuts(chain.from_iterable(plan.programs.values()))
        self._arenas: dict[str, Arena] = {
            o.name: device.memory.reserve(o.name, o.bytes, self._cuts.get(o.name, ()))
            for o in known
            if not is_temporary(o.name)
        }
        self.pool = self._make_pool(plan)
        self._store.add(self._stored(o) for o in known if not is_temporary(o.name))

    # ---- what the executor asks for

    def map(self, name: str, step: str) -> None:
        if not is_temporary(name):
            return self._store.map(name, step)
        self.ledger.acquire(name, self.owned[name].bytes, step)
        self._reserved.add(name)

    def unmap(self, name: str, step: str) -> None:
        if not is_temporary(name):
            return self._store.unmap(name, step)
        self.device.trim()
        self.ledger.release(name, step)
        self._reserved.discard(name)

    def map_part(self, name: str, start: int, stop: int, step: str) -> None:
        self._store.map_part(name, start, stop, step)

    def unmap_part(self, name: str, start: int, stop: int, step: str) -> None:
        self._store.unmap_part(name, start, stop, step)

    def fetch(self, name: str, step: str) -> None:
        self._store.fetch(name, step)

    def offload(self, name: str, step: str) -> None:
        self._store.offload(name, step)

    def offload_part(self, name: str, start: int, stop: int, step: str) -> None:
        self._store.offload_part(name, start, stop, step)

    def put(self, name: str, step: str) -> None:
        self._store.put(name, step)

    def forget(self, name: str, step: str) -> None:
        self._store.forget(name, step)

    def drop(self, name: str, step: str) -> None:
        if is_temporary(name):
            return self.unmap(name, step)
        self._store.drop(name, step)

    def mapped(self, name: str) -> bool:
        return name in self._reserved if is_temporary(name) else self._store.mapped(name)

    def on_host(self, name: str) -> bool:
        return self._store[name].slot is not None

    def wrote(self, names: Sequence[str], step: str) -> None:
        self._store.wrote(*(name for name in names if not is_temporary(name)), step=step)

    def settle(self) -> None:
        self.device.settle()

    def window(self, name: str) -> None:
        self.ledger.mark(name)
        self._host_ledger.mark(name)

    @contextmanager
    def measure(self, names: Sequence[str], step: str) -> Iterator[None]:
        temporary = [name for name in names if is_temporary(name)]
        if not temporary or not self.measuring:
            yield
            return
        with self.device.working() as live:
            yield
        self.ledger.touch(temporary[0], live.peak_bytes, step)

    # ---- what the engine asks for

    def start(self) -> None:
        """Map what the plan has in HBM when an iteration starts: its first window is the first that needs it."""
        self.window(self._first)
        for o in self.owned.values():
            if o.start == "hbm":
                self.map(o.name, "start")

    @contextmanager
    def lent(self, name: str) -> Iterator[None]:
        """Pages of an own object while the block runs, before the first iteration; some are there from the start."""
        if self.owned[name].start == "hbm":
            yield
            return
        self.map(name, "start")
        try:
            yield
        finally:
            self.unmap(name, "start")

    def export(self) -> dict[str, list[int]]:
        """Descriptors of the pages that other processes read."""
        return {o.name: self.handed_out(o.name) for o in self.owned.values() if o.readers}

    def handed_out(self, name: str) -> list[int]:
        """New descriptors of an object's pages, all of which are there."""
        return self._arenas[name].export()

    def adopt(self, name: str, fds: Sequence[int], owner: str, step: str) -> None:
        """Bind another process' pages, read-only."""
        self._store.adopt(name, fds, owner, step)

    def range_like(self, name: str, owner: str) -> Arena:
        """Addresses for the pages that another process has of an object of the same name, bytes and cuts."""
        return self.device.memory.reserve(f"{name} of {owner}", self.owned[name].bytes, self._cuts.get(name, ()))

    def has(self, name: str) -> bool:
        """Whether this process knows the object."""
        return name in self._arenas

    def shared_digest(self) -> str:
        """Of all pages that two processes of this GPU share, those of the trained role's weights."""
        names = sorted([*(o.name for o in self.owned.values() if o.readers), *self.imported])
        return digest(*(self.pages(name, torch.uint8) for name in names))

    def pages(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The object as one flat tensor over its address range; touchable while it is mapped."""
        arena = self._arenas[name]
        return arena.view(0, (arena.nbytes // dtype.itemsize,), dtype)

    def slot(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The object's place in the pinned pool as one flat tensor."""
        return self.pool.slot(name).view(dtype)

    def current(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The object where it is now: its pages if it has any, else its slot."""
        return self.pages(name, dtype) if self.mapped(name) else self.slot(name, dtype)

    def filled(self, *names: str) -> None:
        """The engine has written initial values of these objects where they are: note which slots hold them."""
        self._store.filled(*(name for name in names if not self.mapped(name)), step="start")

    def keep(self, name: str, dtype: torch.dtype, fill: Callable[[torch.Tensor], None]) -> None:
        """Give weights their first values, in their pages if they start with some and in their slot if they have one.

        A frozen role's slot holds them for ever. `fill` writes them into flat memory, once.
        """
        places = [self.pages(name, dtype)] if self.mapped(name) else []
        places += [self.slot(name, dtype)] if self.on_host(name) else []
        for place in places[:1]:
            fill(place)
        for place in places[1:]:
            place.copy_(places[0][: len(place)])
        if self.on_host(name):
            self._store.filled(name, step="start")

    def carried(self) -> tuple[str, ...]:
        """Own objects that hold values between iterations and are not those of a frozen role."""
        return tuple(n for n, o in self.owned.items() if _stays(o) and not o.host_backed)

    def frozen(self) -> tuple[str, ...]:
        """Own objects whose values never change."""
        return tuple(n for n, o in self.owned.items() if _stays(o) and o.host_backed)

    def inodes(self) -> dict[str, list[int]]:
        """Inodes of shared pages: equal in two processes that hold the same physical copy."""
        shared = [*(o.name for o in self.owned.values() if o.readers), *self.imported]
        return {name: self._arenas[name].inodes() for name in shared if self.mapped(name)}

    def take_logs(self) -> tuple[tuple[Event, ...], tuple[Mark, ...], tuple[Event, ...], tuple[Mark, ...]]:
        """Events and marks since the last call, of the device and of the pinned pool."""
        (events, marks), (put, windows) = self.ledger.take_log(), self._host_ledger.take_log()
        return tuple(events), tuple(marks), tuple(put), tuple(windows)

    def close(self) -> None:
        """Let everything go."""
        self._store.close()
        self.pool.close()

    def _make_pool(self, plan: Plan) -> PinnedPool:
        """Its own objects at the plan's places; what outlives an iteration has its place for ever."""
        own = (p for p in plan.summary.host_pool.offsets if p.object in self.owned)
        places = [Place(p.object, p.offset, p.bytes) for p in own]
        pool = PinnedPool(HostMemory(), places, self._host_ledger, pin=self.device.pin)
        for slot in pool.slots():
            if self.owned[slot.name].class_ in LASTING:
                slot.take("allocate pinned")
        return pool

    def _stored(self, o: PlannedObject) -> StoredObject:
        slot = next((s for s in self.pool.slots() if s.name == o.name), None)
        arena = self._arenas[o.name]
        return StoredObject(o.name, o.class_, o.bytes, arena, slot, o.recomputable, host_backed=o.host_backed)
