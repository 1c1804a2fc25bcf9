"""The bytes of one device, counted for all processes that share it: no object beyond capacity, every change on record.

    ledger = Ledger.create("gpu0", capacity_bytes, process="train0")      one process makes it,
    ledger = Ledger.attach(fd, process="rollout0")                        the others get its fd
    ledger.mark("P1 decode"); ledger.acquire("rollout.kv", nbytes, "map rollout.kv"); ledger.release("rollout.kv", ..)

A file lock keeps processes apart; the kernel opens it when its holder dies. The same class counts the pinned host pool
(device HOST), and knows where in it each object lies. `usage.py` turns the logs of several processes into bytes by
window.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rollplex.backends.memory.table import Entry, Table, new_table, out_of_memory, read_table, remedy, write_table
from rollplex.ir.errors import EngineError, OutOfMemory, PlanError

_LOCK_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Event:
    """One change: what it added or took (`nbytes`), and the device's total after it. `ns` is CLOCK_MONOTONIC.

    `place` are the bytes [start, stop) of the pinned pool that an object takes.
    """

    ns: int
    seq: int
    process: str
    window: str
    kind: Literal["acquire", "release", "touch"]
    object: str
    nbytes: int
    total: int
    place: tuple[int, int] | None = None


@dataclass(frozen=True)
class Mark:
    """A window begins; `live` is what the device held at that moment, by object."""

    ns: int
    seq: int
    process: str
    window: str
    live: dict[str, int]


class Ledger:
    """One process' hand on the shared table of a device. Every call waits at most 30 s for the other processes."""

    def __init__(self, fd: int, process: str) -> None:
        """Use `create` or `attach`."""
        # A file description of our own: flock excludes by description, and an inherited or sent fd would share it.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)
        self.process = process
        self._threads = threading.Lock()
        self._events: list[Event] = []
        self._marks: list[Mark] = []
        table = read_table(self._fd)
        self.device, self.capacity_bytes, self.page_bytes = table.device, table.capacity, table.page
        self.window = ""  # the last one marked by this process

    @classmethod
    def create(cls, device: str, capacity_bytes: int, page_bytes: int = mmap.PAGESIZE, *, process: str) -> Ledger:
        """A new, empty table for `device`; `process` names the caller in tables and logs."""
        return cls.attach(new_table(Table(device, capacity_bytes, page_bytes)), process=process)

    @classmethod
    def attach(cls, fd: int, *, process: str) -> Ledger:
        """Join the table behind a received fd, which is taken over and closed."""
        try:
            return cls(fd, process)
        finally:
            os.close(fd)

    def export(self) -> int:
        """A new fd of the table to send to another process; the caller closes it."""
        return os.dup(self._fd)

    def close(self) -> None:
        """Let go of the table; it vanishes with its last process. What this process holds stays on it: see `forget`."""
        self._close()

    def acquire(self, name: str, nbytes: int, step: str, offset: int | None = None) -> int:
        """Count an object of this process, which begins at byte `offset` of the pinned pool; returns its whole pages.

        OutOfMemory over capacity, PlanError if the process holds the object already or another lies there.
        """
        place = None if offset is None else (offset, offset + nbytes)
        with self._table() as table:
            if table.find(self.process, name):
                raise self._plan_error(f"{step}: {name} is mapped already by {self.process}", "drop the second map")
            pages = self._pages(nbytes)
            if place is not None:
                self._refuse_neighbours(table, name, place, step)
            self._check_room(table, name, pages, step)
            table.live.append(Entry(self.process, name, pages, place=place))
            self._log(table, "acquire", name, pages, place)
        return pages

    def acquire_part(self, name: str, nbytes: int, step: str) -> None:
        """Count some more bytes of an object, in whole pages; the first of them make it one that is held."""
        with self._table() as table:
            self._check_room(table, name, nbytes, step)
            if (entry := table.find(self.process, name)) is None:
                table.live.append(Entry(self.process, name, nbytes))
            else:
                entry.nbytes += nbytes
            self._log(table, "acquire", name, nbytes)

    def release(self, name: str, step: str) -> int:
        """Stop counting an object; returns its bytes. PlanError if it is not held, or other processes still read it."""
        with self._table() as table:
            entry = self._held(table, name, step)
            self._refuse_readers(entry, step)
            table.live.remove(entry)
            self._log(table, "release", name, entry.nbytes)
        return entry.nbytes

    def release_part(self, name: str, nbytes: int, step: str) -> None:
        """Stop counting some bytes of an object, in whole pages; with the last of them the object."""
        with self._table() as table:
            entry = self._held(table, name, step)
            self._refuse_readers(entry, step)
            assert nbytes <= entry.nbytes, f"{step}: {nbytes} bytes of {name}, which has {entry.nbytes}"
            entry.nbytes -= nbytes
            if not entry.nbytes:
                table.live.remove(entry)
            self._log(table, "release", name, nbytes)

    def check_release(self, name: str, step: str) -> None:
        """Raise what `release` would raise now, and change nothing: to be asked before pages are let go."""
        with self._table(write=False) as table:
            self._refuse_readers(self._held(table, name, step), step)

    def touch(self, name: str, nbytes: int, step: str) -> None:
        """Record bytes measured inside a reservation; one that proves too small grows, if the device has room."""
        with self._table() as table:
            entry = self._held(table, name, step)
            more = self._pages(nbytes) - entry.nbytes
            if more > 0:
                self._check_room(table, name, more, step)
                entry.nbytes += more
                self._log(table, "acquire", name, more)
            entry.touched = max(entry.touched, nbytes)
            self._log(table, "touch", name, nbytes)

    def borrow(self, name: str, owner: str, step: str) -> None:
        """Note that this process has adopted `owner`'s object: no bytes, but the owner may not release it now."""
        with self._table() as table:
            entry = table.find(owner, name)
            if entry is None:
                raise self._plan_error(f"{step}: {owner} holds no {name}", "map it in its owner first")
            if self.process in entry.readers:
                raise self._plan_error(f"{step}: {name} is mapped already by {self.process}", "drop the second map")
            entry.readers.append(self.process)

    def give_back(self, name: str, owner: str, step: str) -> None:
        """End a `borrow`."""
        with self._table() as table:
            entry = table.find(owner, name)
            if entry is None or self.process not in entry.readers:
                raise self._plan_error(f"{step}: {self.process} has not mapped {name} of {owner}", "drop this unmap")
            entry.readers.remove(self.process)

    def mark(self, window: str) -> None:
        """A window begins in this process."""
        self.window = window
        with self._table() as table:
            table.windows[self.process] = table.last_window = window
            table.seq += 1
            self._marks.append(Mark(time.monotonic_ns(), table.seq, self.process, window, table.by_object()))

    def forget(self, process: str) -> int:
        """Strike out everything of a process that is dead, whose pages the kernel has freed; returns the bytes."""
        with self._table() as table:
            gone = [entry for entry in table.live if entry.process == process]
            table.live = [entry for entry in table.live if entry.process != process]
            for entry in table.live:
                entry.readers = [reader for reader in entry.readers if reader != process]
            for entry in gone:
                self._log(table, "release", entry.object, entry.nbytes)
        return sum(entry.nbytes for entry in gone)

    def live(self) -> list[Entry]:
        """What the device holds now, the largest first."""
        with self._table(write=False) as table:
            return table.by_size()

    @property
    def total_bytes(self) -> int:
        """Bytes live on the device now."""
        with self._table(write=False) as table:
            return table.total

    @property
    def peak_bytes(self) -> int:
        """The most bytes ever live at once."""
        with self._table(write=False) as table:
            return table.peak

    def events(self) -> list[Event]:
        """This process' changes since the last `take_log`."""
        return list(self._events)

    def marks(self) -> list[Mark]:
        """This process' windows since the last `take_log`."""
        return list(self._marks)

    def take_log(self) -> tuple[list[Event], list[Mark]]:
        """Events and marks for the step report; the log starts again empty."""
        events, marks = self._events, self._marks
        self._events, self._marks = [], []
        return events, marks

    def _pages(self, nbytes: int) -> int:
        return -(-nbytes // self.page_bytes) * self.page_bytes

    def _held(self, table: Table, name: str, step: str) -> Entry:
        entry = table.find(self.process, name)
        if entry is None:
            raise self._plan_error(f"{step}: {self.process} holds no {name}", "map it first, or drop this step")
        return entry

    def _refuse_readers(self, entry: Entry, step: str) -> None:
        if entry.readers:
            readers = ", ".join(sorted(entry.readers))
            hint = "let the readers unmap it first: a signal from them is missing before this step"
            raise self._plan_error(f"{step}: {entry.object} is still mapped by {readers}", hint)

    def _refuse_neighbours(self, table: Table, name: str, place: tuple[int, int], step: str) -> None:
        """Two objects at one address: whichever was there first would be lost."""
        for entry in (e for e in table.live if e.lies_in(*place)):
            there = "bytes {} to {}".format(*entry.place or ())
            what = (
                f"{step}: {name} goes to bytes {place[0]} to {place[1]}, and {entry.object} ({entry.process}) is there"
            )
            hint = "verify the plan: places of its pinned pool overlap in time and address"
            raise self._plan_error(f"{what}, in {there}", hint)

    def _log(
        self,
        table: Table,
        kind: Literal["acquire", "release", "touch"],
        name: str,
        nbytes: int,
        place: tuple[int, int] | None = None,
    ) -> None:
        table.seq += 1
        table.peak = max(table.peak, table.total)
        at, window = time.monotonic_ns(), table.window(self.process)
        self._events.append(Event(at, table.seq, self.process, window, kind, name, nbytes, table.total, place))

    def _check_room(self, table: Table, name: str, nbytes: int, step: str) -> None:
        shortfall = table.total + nbytes - table.capacity
        if shortfall <= 0:
            return
        window = table.window(self.process)
        where = f"{self.device}: {step}" + (f", window {window}" if window else "")
        raise OutOfMemory(out_of_memory(table, name, nbytes, shortfall), where=where, hint=remedy(table, name))

    def _plan_error(self, what: str, hint: str) -> PlanError:
        return PlanError(what, where=self.device, hint=hint)

    @contextmanager
    def _table(self, write: bool = True) -> Iterator[Table]:
        """The table under the lock; written back when the block ends well, unchanged when it raises."""
        with self._threads:  # flock keeps processes apart, not the threads of one
            self._lock()
            try:
                table = read_table(self._fd)
                yield table
                if write:
                    write_table(self._fd, table)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock(self) -> None:
        """Ends when the holder unlocks or dies; EngineError after 30 s, when a holder must be stopped or hung."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    what = f"a process has kept the memory ledger locked for {_LOCK_TIMEOUT_S:g} s"
                    hint = "one of the processes of this device is stopped or hung: end it"
                    raise EngineError(what, where=self.device, hint=hint) from None
                time.sleep(0.0002)
