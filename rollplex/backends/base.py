"""What a backend's memory must offer: a range reserved once, pages mapped and released behind it, pages shared by fd.

Two implementations: `host` (memfd pages over a PROT_NONE reservation) and `cuda` (reserve = cuMemAddressReserve,
map = cuMemCreate + cuMemMap + cuMemSetAccess, unmap = cuMemUnmap + cuMemRelease, export = a POSIX file descriptor
for every handle). design.md section 6; the paper's section 3.3 (one physical copy of the actor).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Arena(Protocol):
    """One reserved address range of one object; its pages come and go, its address and the views over it stay.

    Not thread-safe: one thread of one process maps and unmaps an arena. None of these calls counts bytes against a
    capacity; that is `Ledger`'s work, and `ObjectStore` does both.
    """

    @property
    def name(self) -> str:
        """The object's name, for messages and for /proc/PID/maps."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the range: what was asked, rounded up to whole pages."""
        ...

    @property
    def address(self) -> int:
        """First address of the range; never changes."""
        ...

    @property
    def mapped(self) -> bool:
        """Whether there are pages behind the range, one's own or adopted ones."""
        ...

    def inodes(self) -> list[int]:
        """Inodes of the pages, in order, where they have some (a host's): equal in two processes that share them."""
        ...

    @property
    def adopted(self) -> bool:
        """Whether the pages behind the range belong to another process."""
        ...

    def map(self, writable: bool = True) -> None:
        """Put fresh zero pages behind the range. PlanError if mapped; OutOfMemory if the machine has no pages."""
        ...

    def map_part(self, start: int, stop: int) -> None:
        """Put fresh zero pages behind bytes [start, stop); with the first of them the arena is mapped.

        PlanError unless it lies between cuts that the range was reserved with, and if some of its pages are there.
        """
        ...

    def unmap(self) -> None:
        """Let the pages go; whoever adopted them keeps them, a later touch of a view faults. PlanError if unmapped."""
        ...

    def unmap_part(self, start: int, stop: int) -> None:
        """Let the pages of bytes [start, stop) go; with the last of them the arena is unmapped.

        PlanError unless it lies between cuts that the range was reserved with, and if its pages are gone or adopted.
        """
        ...

    def export(self) -> list[int]:
        """New file descriptors of the pages, one a chunk, in order; the caller closes them (each keeps pages alive).

        PlanError if unmapped or adopted: only the owner hands pages out.
        """
        ...

    def adopt(self, fds: Sequence[int], writable: bool = False) -> None:
        """Map another process' pages behind this range, read-only unless asked; the fds are taken over and closed.

        PlanError if mapped, or if the pages are not exactly `nbytes` long.
        """
        ...

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over the range, without a copy; may be made while unmapped, stays valid across remaps.

        The address range outlives the arena for as long as a view lives. Misaligned or out of range is our own bug.
        """
        ...

    def close(self) -> None:
        """Release pages and the range; safe to call twice. A view that is still alive faults when touched."""
        ...


@runtime_checkable
class Memory(Protocol):
    """Where arenas come from; one a process and device."""

    @property
    def page_bytes(self) -> int:
        """The granularity of everything reserved and mapped (4 KiB on a host, 2 MiB on the GPUs of today)."""
        ...

    def reserve(self, name: str, nbytes: int, cuts: Sequence[int] = ()) -> Arena:
        """Reserve an address range without pages; OutOfMemory if the address space has no room.

        At `cuts`, bytes from its beginning in whole pages, parts may be mapped and unmapped apart.
        """
        ...
