"""The pinned host pool: allocated once, and every object at the place in it that the plan gives; saved state lies here.

address     0            16           48                     64
train 0     |   master   |  moments   | saved state          |     P1, P2: from the first prefix on
            |   master   |  moments   | gradients |          |     P3: from their offload to their last chunk

pool = PinnedPool(memory, [Place("actor.master", 0, 16), Place("actor.prefix_saved", 48, 16)], host_ledger)
master = pool.slot("actor.master"); master.take("start"); master.view(torch.float32)    a tensor over it, no copy

All processes of a GPU share its addresses; each has pages only behind places of its own. Source: design.md section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from rollplex.backends.base import Arena
from rollplex.backends.memory.ledger import Ledger
from rollplex.backends.memory.memfd import HostMemory, lock
from rollplex.backends.memory.table import amount
from rollplex.ir.errors import OutOfMemory, PlanError

ALIGN_BYTES = 64  # a cache line; also enough for every dtype


@dataclass(frozen=True)
class Place:
    """Bytes [offset, stop) of a GPU's pool, planned for one object."""

    name: str
    offset: int
    nbytes: int

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes

    def __str__(self) -> str:
        return f"{self.name} (bytes {self.offset} to {self.stop})"


class PinnedPool:
    """One process' part of a GPU's pinned memory. `lock_error` says why its pages are not locked in RAM, if so."""

    def __init__(
        self,
        memory: HostMemory,
        places: Sequence[Place],
        ledger: Ledger,
        name: str = "pinned",
        pin: Callable[[Arena], str] = lock,
    ) -> None:
        """What is taken is counted on the host's `ledger`, which all processes of a GPU share; `pin` locks the pages.

        PlanError for places that cannot be used; OutOfMemory where they end behind the ledger's capacity.
        """
        _check(places)
        _check_room(places, ledger, f"allocate {name}")
        self._ledger = ledger
        self._slots = {place.name: Slot(self, place) for place in places}
        self._taken: set[str] = set()
        self._arenas = [(start, memory.reserve(name, stop - start)) for start, stop in stretches(places)]
        for _, arena in self._arenas:
            arena.map()
        errors = [pin(arena) for _, arena in self._arenas]
        self.lock_error = next((error for error in errors if error), "")

    @property
    def nbytes(self) -> int:
        """Bytes of its pages."""
        return sum(arena.nbytes for _, arena in self._arenas)

    @property
    def locked(self) -> bool:
        return not self.lock_error

    def slot(self, name: str) -> Slot:
        """The slot of that name; PlanError naming the slots there are."""
        if name not in self._slots:
            known = ", ".join(self._slots) or "none"
            raise _plan_error(f"no slot {name}; there are: {known}", "plan the slot, or drop the step that needs it")
        return self._slots[name]

    def slots(self) -> tuple[Slot, ...]:
        """All slots, in the order they were asked for."""
        return tuple(self._slots.values())

    def take(self, place: Place, step: str) -> None:
        """See `Slot.take`."""
        if place.name not in self._taken:
            self._ledger.acquire(place.name, place.nbytes, step, place.offset)
            self._taken.add(place.name)

    def free(self, place: Place, step: str) -> None:
        """See `Slot.free`."""
        if place.name in self._taken:
            self._taken.discard(place.name)
            self._ledger.release(place.name, step)

    def view(self, place: Place, start: int, stop: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A tensor over bytes [start, stop) of the pool, which are of a place that is taken; PlanError otherwise."""
        if not place.offset <= start <= stop <= place.stop:
            others = (
                s.place for s in self.slots() if s.place != place and start < s.place.stop and s.place.offset < stop
            )
            beside = ", ".join(map(str, others)) or "no object's place"
            what = f"bytes {start} to {stop} are not those of {place}: they are {beside}"
            raise _plan_error(what, "lower the budgets of the workload, or compile again")
        if place.name not in self._taken:
            raise _plan_error(f"{place} is not in use now: another object may lie there", "offload it first")
        first, arena = next((a, arena) for a, arena in self._arenas if a <= start and stop <= a + arena.nbytes)
        return arena.view(start - first, shape, dtype)

    def close(self) -> None:
        """Give pages and bytes back; a view touched afterwards faults. Safe to call twice."""
        for slot in self.slots():
            slot.free("free the pinned pool")
        for _, arena in self._arenas:
            arena.close()


@dataclass(frozen=True)
class Slot:
    """A place of one process' pool: whoever takes it has it until it is freed."""

    pool: PinnedPool
    place: Place

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def nbytes(self) -> int:
        return self.place.nbytes

    def take(self, step: str) -> None:
        """Something is put there from now on; PlanError naming the object that is there. Again is no change."""
        self.pool.take(self.place, step)

    def free(self, step: str) -> None:
        """What was there is needed no more: others may be put there. Again is no change."""
        self.pool.free(self.place, step)

    def view(self, dtype: torch.dtype, shape: Sequence[int] | None = None, offset_bytes: int = 0) -> torch.Tensor:
        """A contiguous tensor over the slot, or over all of it from `offset_bytes` on if no shape is given."""
        if shape is None:
            shape = ((self.nbytes - offset_bytes) // dtype.itemsize,)
        start = self.place.offset + offset_bytes
        return self.pool.view(self.place, start, start + prod(shape) * dtype.itemsize, dtype, shape)


def stretches(places: Iterable[Place]) -> list[tuple[int, int]]:
    """The addresses that these places cover: ranges [start, stop) with nothing between two of them."""
    found: list[tuple[int, int]] = []
    for place in sorted(places, key=lambda p: (p.offset, p.stop)):
        start, stop = found.pop() if found and place.offset <= found[-1][1] else (place.offset, place.stop)
        found.append((start, max(stop, place.stop)))
    return found


def _check(places: Sequence[Place]) -> None:
    """Refuse places that share a name, and those at which no tensor may begin."""
    names = [place.name for place in places]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _plan_error(f"slots named twice: {', '.join(twice)}", "make one slot an object")
    for place in places:
        if place.offset % ALIGN_BYTES:
            what = f"{place} does not begin at a multiple of {ALIGN_BYTES} bytes"
            raise _plan_error(what, "compile again: places are whole pages")


def _check_room(places: Sequence[Place], ledger: Ledger, step: str) -> None:
    """Refuse places behind the end of the pool, whatever lies in them at one time."""
    short = max((place.stop for place in places), default=0) - ledger.capacity_bytes
    if short > 0:
        last = max(places, key=lambda p: p.stop)
        what = (
            f"{last} ends behind the {amount(ledger.capacity_bytes)} of a GPU: {amount(short)} ({short} bytes) too many"
        )
        hint = "raise the cluster's host memory in the job, or let the plan keep less on the host"
        raise OutOfMemory(what, where=f"{ledger.device}: {step}", hint=hint)


def _plan_error(what: str, hint: str) -> PlanError:
    return PlanError(what, where="pinned pool", hint=hint)
