"""Host arenas: memfd pages mapped with MAP_FIXED over a PROT_NONE reservation, so a use after unmap faults as on a GPU.

    memory = HostMemory()
    arena = memory.reserve("actor.snapshot", nbytes)     # addresses only
    weights = arena.view(0, (64, 64), torch.bfloat16)    # valid for ever, touchable while mapped
    arena.map(); fds = arena.export(); arena.unmap()     # the pages go when the last process lets them go

There are no files and no named shared memory: pages vanish with the processes that hold them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from rollplex.backends.base import Arena
from rollplex.backends.memory.fds import close_all
from rollplex.backends.memory.paged import Chunk, PagedArena, round_up
from rollplex.ir.errors import OutOfMemory

CHUNK_BYTES = 64 << 20
_MAP_FIXED = 0x10  # the mmap module of Python 3.11 lacks these
_MAP_NORESERVE = 0x4000
_EMPTY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value
_PROT_NONE = 0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int = -1) -> int:
    at = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if at == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return at


class _Reservation:
    """An address range without pages; given back when the arena and every view over it are gone."""

    def __init__(self, nbytes: int) -> None:
        self.address = _mmap(None, nbytes, _PROT_NONE, _EMPTY)
        self.nbytes = nbytes
        self._free = weakref.finalize(self, _libc.munmap, self.address, nbytes)

    def cover(self, start: int, stop: int) -> None:
        """Lay the empty range over whatever pages are mapped there, in one system call."""
        _mmap(self.address + start, stop - start, _PROT_NONE, _EMPTY | _MAP_FIXED)


def _buffer_over(reserved: _Reservation) -> ctypes.Array[ctypes.c_char]:
    """A ctypes array over the range; tensors made from it keep it alive, and it keeps the range reserved."""
    # Only an instance of a subclass takes attributes of its own.
    kind: Any = type("ArenaBuffer", (ctypes.c_char * reserved.nbytes,), {})
    buffer = kind.from_address(reserved.address)
    buffer.reserved = reserved
    return buffer


class HostArena(PagedArena):
    """`Arena` on a host: a chunk of pages is a memfd."""

    def __init__(self, name: str, nbytes: int, chunk_bytes: int, cuts: Sequence[int]) -> None:
        super().__init__(name, nbytes, chunk_bytes, cuts)
        self._range = _Reservation(nbytes)
        self._fds: dict[Chunk, int] = {}  # of the own chunks that are there
        self._buffer = _buffer_over(self._range)
        self._close_fds = weakref.finalize(self, _close_values, self._fds)

    @property
    def address(self) -> int:
        return self._range.address

    def inodes(self) -> list[int]:
        with open("/proc/self/maps") as maps:
            rows = [line.split() for line in maps]
        starts = [(int(row[0].split("-")[0], 16), int(row[4])) for row in rows]
        return [inode for start, inode in starts if self.address <= start < self.address + self.nbytes and inode]

    def _make(self, chunks: Sequence[Chunk], writable: bool) -> None:
        made: dict[Chunk, int] = {}
        at = chunks[0]
        try:
            for at in chunks:
                made[at] = self._new_pages(at.nbytes)
            for at, fd in made.items():
                self._lay(at, fd, writable)
        except OSError as error:
            for chunk in made:
                self._range.cover(chunk.start, chunk.stop)
            _close_values(made)
            raise self._no_pages(at.nbytes, error) from error
        self._fds |= made

    def _release(self, chunks: Sequence[Chunk]) -> None:
        self._range.cover(chunks[0].start, chunks[-1].stop)
        close_all([self._fds.pop(chunk) for chunk in chunks if chunk in self._fds])

    def _hand_out(self) -> list[int]:
        return [os.dup(self._fds[chunk]) for chunk in self._chunks]

    def _size_of(self, fds: Sequence[int]) -> int:
        return sum(os.fstat(fd).st_size for fd in fds)

    def _take(self, fds: Sequence[int], writable: bool) -> None:
        at = 0
        for fd in fds:
            stop = at + os.fstat(fd).st_size
            self._lay(Chunk(at, stop), fd, writable)
            at = stop

    def _lay(self, chunk: Chunk, fd: int, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _mmap(self.address + chunk.start, chunk.nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)

    def _tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        numel = prod(shape)
        if numel == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._buffer, dtype=dtype, count=numel, offset=offset_bytes).view(shape)

    def _new_pages(self, nbytes: int) -> int:
        """A memfd whose pages exist now, not at first touch: a full machine is an error here, not a SIGBUS later."""
        fd = os.memfd_create(f"rollplex:{self.name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _no_pages(self, nbytes: int, error: OSError) -> OutOfMemory:
        what = f"the host gave no {nbytes} bytes of {self.nbytes} for {self.name} ({error.strerror})"
        return OutOfMemory(what, where="host memory", hint="free memory on this machine, or shrink the workload")


def _close_values(fds: dict[Chunk, int]) -> None:
    close_all(list(fds.values()))
    fds.clear()


class HostMemory:
    """`Memory` of a host process."""

    def __init__(self, page_bytes: int = mmap.PAGESIZE, chunk_bytes: int = CHUNK_BYTES) -> None:
        assert page_bytes % mmap.PAGESIZE == 0, f"page_bytes {page_bytes} is no multiple of {mmap.PAGESIZE}"
        assert chunk_bytes % page_bytes == 0, f"chunk_bytes {chunk_bytes} is no multiple of {page_bytes}"
        self._page_bytes = page_bytes
        self._chunk_bytes = chunk_bytes

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    def reserve(self, name: str, nbytes: int, cuts: Sequence[int] = ()) -> HostArena:
        rounded = max(round_up(nbytes, self.page_bytes), self.page_bytes)
        try:
            return HostArena(name, rounded, self._chunk_bytes, cuts)
        except OSError as error:
            what = f"no address range of {rounded} bytes for {name} ({error.strerror})"
            raise OutOfMemory(
                what, where="host memory", hint="raise the limit on virtual memory (ulimit -v)"
            ) from error


def lock(arena: Arena) -> str:
    """Pin a mapped arena in RAM; returns "" or why the kernel refused (a small RLIMIT_MEMLOCK, mostly)."""
    if _libc.mlock(arena.address, arena.nbytes) == 0:
        return ""
    return f"mlock of {arena.nbytes} bytes: {os.strerror(ctypes.get_errno())}"
