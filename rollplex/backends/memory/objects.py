"""Planned objects on one device: map, unmap, fetch, offload and drop, refusing whatever would lose or invent data.

    object      pages    host copy          map      -        -> pages, contents undefined
    ---------------------------------       fetch    copy     -> pages
    permanent   one of the two, always      offload  pages    -> copy, pages gone
    others      may have neither            unmap    pages gone, contents too unless the host copy is valid
                                            drop     both gone; refused for permanent and for what nobody makes again

Bytes are counted on the device's ledger before pages are mapped, and after they are gone. A device may lack pages that
the ledger has room for: free blocks that torch keeps for later are handed back then, and it is asked once more.
Source: design.md sections 2 and 6.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from rollplex.backends.base import Arena
from rollplex.backends.device import Device
from rollplex.backends.memory.ledger import Ledger
from rollplex.backends.memory.pinned import Slot
from rollplex.backends.memory.table import amount
from rollplex.ir.errors import OutOfMemory, PlanError

StateClass = Literal["permanent", "regenerable", "boundary", "phase-local"]


@dataclass
class StoredObject:
    """One object of this process: where its bytes live on the device, and where on the host if it ever goes there.

    `host_valid`: the slot holds the object's present value. `host_backed`: it always will (frozen weights).
    `recomputable`: a later step makes it again. `owner` is set while the pages are another process'.
    """

    name: str
    state_class: StateClass
    nbytes: int
    arena: Arena
    slot: Slot | None = None
    recomputable: bool = False
    host_backed: bool = False
    host_valid: bool = False
    owner: str = ""


@dataclass
class Traffic:
    """Bytes copied one way over the host link, and the seconds that took."""

    nbytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds if self.seconds else 0.0

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        start = time.perf_counter()
        into.copy_(source)
        self.seconds += time.perf_counter() - start
        self.nbytes += source.numel() * source.element_size()


@dataclass
class ObjectStore:
    """All objects of one process on one device. `step` arguments are the plan step's text, for messages and the log."""

    ledger: Ledger
    device: Device
    fetched: Traffic = field(default_factory=Traffic)
    offloaded: Traffic = field(default_factory=Traffic)
    _objects: dict[str, StoredObject] = field(default_factory=dict)

    def add(self, objects: Iterable[StoredObject]) -> None:
        """Take objects in; they keep their names, and a name comes once."""
        for item in objects:
            assert item.name not in self._objects, f"object {item.name} twice"
            assert item.nbytes <= item.arena.nbytes, f"{item.name}: {item.nbytes} bytes, arena {item.arena.nbytes}"
            self._objects[item.name] = item

    def __getitem__(self, name: str) -> StoredObject:
        if name not in self._objects:
            known = ", ".join(self._objects) or "none"
            raise PlanError(f"no object {name}; there are: {known}", where=self.ledger.process, hint="compile again")
        return self._objects[name]

    def names(self) -> tuple[str, ...]:
        """All objects, in the order they came."""
        return tuple(self._objects)

    def mapped(self, name: str) -> bool:
        """Whether the object is on the device now."""
        return self[name].arena.mapped

    def map(self, name: str, step: str) -> None:
        """Fresh zero pages; PlanError if mapped, OutOfMemory if the device has no room."""
        item = self[name]
        self._refuse(step, item, item.arena.mapped, "is mapped already", "drop this step, or unmap it before")
        self._attach(item, step, item.arena.map)

    def map_part(self, name: str, start: int, stop: int, step: str) -> None:
        """Fresh zero pages for bytes [start, stop); PlanError if some are there, OutOfMemory if there is no room."""
        item = self[name]
        self.ledger.acquire_part(name, stop - start, step)
        try:
            self._ask_for(item, stop - start, step, lambda: item.arena.map_part(start, stop))
        except BaseException:
            self.ledger.release_part(name, stop - start, step)
            raise

    def unmap_part(self, name: str, start: int, stop: int, step: str) -> None:
        """Let the pages of bytes [start, stop) go; PlanError as `unmap`."""
        item = self[name]
        self._refuse_lost(step, item)
        self.ledger.check_release(name, step)
        item.arena.unmap_part(start, stop)
        self.ledger.release_part(name, stop - start, step)

    def adopt(self, name: str, fds: Sequence[int], owner: str, step: str) -> None:
        """Map the pages that process `owner` exported, read-only; they are counted once, by their owner."""
        item = self[name]
        self._refuse(step, item, item.arena.mapped, "is mapped already", "drop this step, or unmap it before")
        self.ledger.borrow(name, owner, step)
        item.arena.adopt(fds)
        item.owner = owner

    def unmap(self, name: str, step: str) -> None:
        """Let the pages go. PlanError if unmapped, if another process reads them, or if the only copy would be lost."""
        item = self[name]
        self._refuse_lost(step, item)
        self._detach(item, step)

    def fetch(self, name: str, step: str) -> None:
        """Host copy -> freshly mapped pages; the host copy stays valid until `wrote`."""
        item = self[name]
        self._refuse(step, item, item.arena.mapped, "is mapped already", "drop this step, or unmap it before")
        hint = "offload it, or fill its slot, before it is fetched"
        self._refuse(step, item, not item.host_valid, "has no valid host copy", hint)
        slot = self._slot(item, step)
        self._attach(item, step, item.arena.map)
        self.fetched.copy(_bytes_of(item), slot.view(torch.uint8, (item.nbytes,)))

    def offload(self, name: str, step: str) -> None:
        """Pages -> host copy, then unmap; the copy itself is left out when the host still holds the same bytes."""
        item = self[name]
        self._refuse_unmapped(step, item)
        self._refuse(step, item, bool(item.owner), f"belongs to {item.owner}", "only its owner may offload it")
        slot = self._slot(item, step)
        slot.take(step)
        if not item.host_valid:
            self.offloaded.copy(slot.view(torch.uint8, (item.nbytes,)), _bytes_of(item))
            item.host_valid = True
        self._detach(item, step)

    def offload_part(self, name: str, start: int, stop: int, step: str) -> None:
        """Bytes [start, stop) -> host copy, then let their pages go; the copy is valid with the last part."""
        item = self[name]
        self._refuse_unmapped(step, item)
        slot = self._slot(item, step)
        slot.take(step)
        into = slot.view(torch.uint8, (stop - start,), start)
        self.offloaded.copy(into, _bytes_of(item)[start:stop])
        item.arena.unmap_part(start, stop)
        self.ledger.release_part(name, stop - start, step)
        item.host_valid = not item.arena.mapped

    def drop(self, name: str, step: str) -> None:
        """Discard the object wherever it is; PlanError unless some later step makes it again."""
        item = self[name]
        self._refuse(step, item, item.state_class == "permanent", "is permanent", "offload it instead")
        lost = item.state_class == "boundary" and not item.recomputable
        self._refuse(step, item, lost, "is a boundary that nothing recomputes", "keep or offload it")
        if item.arena.mapped:
            self._detach(item, step)
        item.host_valid = item.host_valid and item.host_backed

    def view(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
        offset_bytes: int = 0,
        step: str = "use",
    ) -> torch.Tensor:
        """A tensor over the object's pages (all of them if no shape is given); PlanError if it is not mapped."""
        item = self[name]
        self._refuse_unmapped(step, item)
        if shape is None:
            shape = ((item.nbytes - offset_bytes) // dtype.itemsize,)
        return item.arena.view(offset_bytes, shape, dtype)

    def wrote(self, *names: str, step: str = "run") -> None:
        """A step has written these objects on the device: a host copy from before is stale now."""
        for name in names:
            item = self[name]
            self._refuse_unmapped(step, item)
            self._refuse(step, item, item.host_backed, "is frozen", "update a role that is trained")
            item.host_valid = False

    def filled(self, *names: str, step: str = "load") -> None:
        """The host slots of these objects hold their values now (first load, or a stream that wrote them)."""
        for name in names:
            self._slot(self[name], step).take(step)
            self[name].host_valid = True

    def put(self, name: str, step: str) -> None:
        """A task begins to stream an object into its slot."""
        self._slot(self[name], step).take(step)

    def forget(self, name: str, step: str) -> None:
        """Nothing uses an object any more: its slot is free."""
        item = self[name]
        item.host_valid = False
        self._slot(item, step).free(step)

    def close(self) -> None:
        """Let every page go and take this process' objects off the ledger; for the end of a process, in any state."""
        for item in self._objects.values():
            if item.arena.mapped and item.owner:
                self._detach(item, "close")
            item.arena.close()
        self.ledger.forget(self.ledger.process)

    def _attach(self, item: StoredObject, step: str, pages: Callable[[], None]) -> None:
        self.ledger.acquire(item.name, item.nbytes, step)
        try:
            self._ask_for(item, item.nbytes, step, pages)
        except BaseException:
            self.ledger.release(item.name, step)
            raise

    def _ask_for(self, item: StoredObject, nbytes: int, step: str, pages: Callable[[], None]) -> None:
        """Pages of the device; twice, if what this process keeps for later may be what is missing."""
        try:
            return pages()
        except OutOfMemory:
            self.device.trim()
        try:
            pages()
        except OutOfMemory as error:
            (refused,), ledger = error.problems, self.ledger
            what = (
                f"{step}: {item.name} asks for {amount(nbytes)}, the device has {amount(self.device.free_bytes())} "
                f"free; by the plan {amount(ledger.total_bytes)} of {amount(ledger.capacity_bytes)} are live with it "
                f"({refused.where}: {refused.what})"
            )
            hint = "end other programs that have its memory, or lower cluster.capacity_gib and compile again"
            raise OutOfMemory(what, where=self._where, hint=hint) from error

    def _detach(self, item: StoredObject, step: str) -> None:
        """Pages go first, then their bytes; but the ledger's refusal (a reader is left) must come before either."""
        if item.owner:
            item.arena.unmap()
            self.ledger.give_back(item.name, item.owner, step)
            item.owner = ""
            return
        self.ledger.check_release(item.name, step)
        item.arena.unmap()
        self.ledger.release(item.name, step)

    def _slot(self, item: StoredObject, step: str) -> Slot:
        missing = item.slot is None or item.slot.nbytes < item.nbytes
        self._refuse(step, item, missing, "has no slot of its size in the pinned pool", "plan a slot for it")
        assert item.slot is not None
        return item.slot

    def _refuse_lost(self, step: str, item: StoredObject) -> None:
        """Pages that go without a copy of their contents are there, and need none."""
        self._refuse_unmapped(step, item)
        only = item.state_class == "permanent" and not item.host_valid and not item.owner
        self._refuse(step, item, only, "is permanent and has no other copy", "offload it instead")

    def _refuse_unmapped(self, step: str, item: StoredObject) -> None:
        place = "on the host" if item.host_valid else "nowhere"
        hint = "fetch or map it before this step"
        self._refuse(step, item, not item.arena.mapped, f"is not mapped (its contents are {place})", hint)

    def _refuse(self, step: str, item: StoredObject, wrong: bool, what: str, hint: str) -> None:
        if wrong:
            raise PlanError(f"{step}: {item.name} {what}", where=self._where, hint=hint)

    @property
    def _where(self) -> str:
        return f"{self.ledger.process}: {self.ledger.window}" if self.ledger.window else self.ledger.process


def _bytes_of(item: StoredObject) -> torch.Tensor:
    return item.arena.view(0, (item.nbytes,), torch.uint8)
