"""What is live on one device, in a memfd that several processes read and write, and the message when it is full.

Two slots of JSON, of which one counts: a process killed while it writes leaves the table as it was.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

HOST = "host"  # the pinned pool, as a device
GIB = 1 << 30
_SLOT_BYTES = 1 << 20
_NUMBER = struct.Struct("<Q")  # at 0: the slot that counts; at the start of a slot: the length of its JSON


@dataclass
class Entry:
    """One live object; `touched` is the measured peak inside a reservation, `readers` the processes that adopted it.

    `place` is where it lies in the pinned pool, [start, stop); elsewhere addresses are each object's own.
    """

    process: str
    object: str
    nbytes: int
    touched: int = 0
    readers: list[str] = field(default_factory=list)
    place: Sequence[int] | None = None

    def lies_in(self, start: int, stop: int) -> bool:
        """Whether one of these bytes of the pool is its own."""
        return self.place is not None and max(start, self.place[0]) < min(stop, self.place[1])


@dataclass
class Table:
    """The state of a device: everything live, the peak, and the window each process is in."""

    device: str
    capacity: int
    page: int
    seq: int = 0
    peak: int = 0
    live: list[Entry] = field(default_factory=list)
    windows: dict[str, str] = field(default_factory=dict)
    last_window: str = ""

    @property
    def total(self) -> int:
        return sum(entry.nbytes for entry in self.live)

    def by_size(self) -> list[Entry]:
        return sorted(self.live, key=lambda entry: (-entry.nbytes, entry.object, entry.process))

    def by_object(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        for entry in self.live:
            sums[entry.object] = sums.get(entry.object, 0) + entry.nbytes
        return sums

    def find(self, process: str, name: str) -> Entry | None:
        return next((e for e in self.live if e.process == process and e.object == name), None)

    def window(self, process: str) -> str:
        """The window `process` marked last; of a process that marks none, the last one anybody marked."""
        return self.windows.get(process, self.last_window)


def new_table(table: Table) -> int:
    """A memfd that holds `table`; the caller closes it."""
    fd = os.memfd_create(f"rollplex:ledger:{table.device}", os.MFD_CLOEXEC)
    os.ftruncate(fd, _NUMBER.size + 2 * _SLOT_BYTES)
    write_table(fd, table)
    return fd


def read_table(fd: int) -> Table:
    """The table as last written; the caller holds the lock."""
    at = _NUMBER.size + _read_number(fd, 0) * _SLOT_BYTES
    data = json.loads(os.pread(fd, _read_number(fd, at), at + _NUMBER.size))
    data["live"] = [Entry(**entry) for entry in data["live"]]
    return Table(**data)


def write_table(fd: int, table: Table) -> None:
    """Fill the slot that does not count, then make it count; the caller holds the lock."""
    body = json.dumps(asdict(table)).encode()
    assert len(body) + _NUMBER.size <= _SLOT_BYTES, f"{len(table.live)} live objects do not fit the ledger"
    spare = 1 - _read_number(fd, 0)
    os.pwrite(fd, _NUMBER.pack(len(body)) + body, _NUMBER.size + spare * _SLOT_BYTES)
    os.pwrite(fd, _NUMBER.pack(spare), 0)


def out_of_memory(table: Table, name: str, nbytes: int, shortfall: int) -> str:
    """What was asked, what the device has, by how much it falls short, and everything live by size."""
    rows = [f"    {amount(e.nbytes):>12}  {e.object}  ({e.process})" for e in table.by_size()]
    head = (
        f"{name} asks for {amount(nbytes)}, but {amount(table.total)} of {amount(table.capacity)} are live: "
        f"{amount(shortfall)} ({shortfall} bytes) too many"
    )
    return "\n".join([head, *rows])


def remedy(table: Table, name: str) -> str:
    """What to try when `name` found no room."""
    if table.device == HOST:
        return "raise the cluster's host memory in the job, or let the plan keep less on the host"
    largest = next((entry.object for entry in table.by_size() if entry.object != name), None)
    if largest is None:
        return f"split {name} into smaller parts, or plan for a device with more memory"
    return f"release or offload {largest} before this step, or make {name} smaller"


def amount(nbytes: int) -> str:
    """Bytes for people: GiB from 0.1 GiB on, then MiB, then KiB."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit // 10:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes / 1024:.2f} KiB"


def _read_number(fd: int, at: int) -> int:
    (number,) = _NUMBER.unpack(os.pread(fd, _NUMBER.size, at))
    return number
