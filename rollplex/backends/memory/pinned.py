"""The pinned host pool: allocated once, never grown, cut into named slots; offloaded state lives here.

pool = PinnedPool(memory, [SlotSpec("actor.master", n), SlotSpec("actor.prefix_saved", m)], host_ledger)
master = pool.slot("actor.master").view(torch.float32)        a tensor over the slot, no copy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from rollplex.backends.base import Arena
from rollplex.backends.memory.ledger import Ledger
from rollplex.backends.memory.memfd import HostMemory, lock
from rollplex.backends.memory.paged import round_up
from rollplex.ir.errors import PlanError

ALIGN_BYTES = 64  # a cache line; also enough for every dtype


@dataclass(frozen=True)
class SlotSpec:
    """A slot to make; without an offset it follows the slots before it."""

    name: str
    nbytes: int
    offset: int | None = None


class PinnedPool:
    """One process' pinned memory. `locked` says whether the pages are locked in RAM, `lock_error` why not."""

    def __init__(
        self,
        memory: HostMemory,
        specs: Sequence[SlotSpec],
        ledger: Ledger,
        name: str = "pinned",
        pin: Callable[[Arena], str] = lock,
    ) -> None:
        """Every slot is counted on the host's `ledger`, which all processes of the host share; `pin` locks the pages.

        OutOfMemory if they do not fit; PlanError if two overlap or share a name.
        """
        self._ledger = ledger
        placed = _place(specs, memory.page_bytes)
        _check_apart(placed)
        self._slots = {spec.name: Slot(self, spec.name, offset, spec.nbytes) for spec, offset in placed}
        for slot in self._slots.values():
            ledger.acquire(slot.name, slot.nbytes, f"allocate {name}")
        self.arena = memory.reserve(name, max((slot.offset + slot.nbytes for slot in self.slots()), default=0))
        self.arena.map()
        self.lock_error = pin(self.arena)

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes

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

    def close(self) -> None:
        """Give pages and bytes back; a view touched afterwards faults. Safe to call twice."""
        if self.arena.mapped:
            self.arena.close()
            for slot in self.slots():
                self._ledger.release(slot.name, "free the pinned pool")


@dataclass(frozen=True)
class Slot:
    """A named range of the pool."""

    pool: PinnedPool
    name: str
    offset: int
    nbytes: int

    def view(self, dtype: torch.dtype, shape: Sequence[int] | None = None, offset_bytes: int = 0) -> torch.Tensor:
        """A contiguous tensor over the slot, or over all of it from `offset_bytes` on if no shape is given."""
        if shape is None:
            shape = ((self.nbytes - offset_bytes) // dtype.itemsize,)
        stop = offset_bytes + prod(shape) * dtype.itemsize
        assert 0 <= offset_bytes <= stop <= self.nbytes, f"slot {self.name}: view of [{offset_bytes}, {stop}) bytes"
        return self.pool.arena.view(self.offset + offset_bytes, shape, dtype)


def _place(specs: Sequence[SlotSpec], page_bytes: int) -> list[tuple[SlotSpec, int]]:
    """The offset of each slot: as planned, or on the first page after the slot before it."""
    placed, end = [], 0
    for spec in specs:
        offset = round_up(end, page_bytes) if spec.offset is None else spec.offset
        assert offset % ALIGN_BYTES == 0, f"slot {spec.name}: offset {offset} is not a multiple of {ALIGN_BYTES}"
        placed.append((spec, offset))
        end = offset + spec.nbytes
    return placed


def _check_apart(placed: Sequence[tuple[SlotSpec, int]]) -> None:
    """Refuse slots that share a name or a byte."""
    names = [spec.name for spec, _ in placed]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _plan_error(f"slots named twice: {', '.join(twice)}", "make one slot an object")
    for (low, start), (high, offset) in pairwise(sorted(placed, key=lambda pair: pair[1])):
        if start + low.nbytes > offset:
            what = f"slots {low.name} and {high.name} overlap at byte {offset}"
            raise _plan_error(what, "let the pool place them: leave the offsets out")


def _plan_error(what: str, hint: str) -> PlanError:
    return PlanError(what, where="pinned pool", hint=hint)
