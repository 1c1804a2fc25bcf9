"""What every arena refuses, whatever its pages are made of; `HostArena` and `CudaArena` say how pages come and go.

state       map       unmap     export    adopt
unmapped    owned     refused   refused   adopted
owned       refused   unmapped  fds       refused
adopted     refused   unmapped  refused   refused

Pages are made in chunks. An owned arena may let them go part by part, and is unmapped with the last; they may come
part by part too, and it is mapped with the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import torch

from rollplex.backends.memory.fds import close_all
from rollplex.ir.errors import PlanError


@dataclass(frozen=True)
class Chunk:
    """Bytes [start, stop) of a range, whose pages come and go together."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def chunks_of(nbytes: int, chunk_bytes: int, cuts: Sequence[int]) -> tuple[Chunk, ...]:
    """The range in chunks of at most `chunk_bytes` between the cuts."""
    edges = sorted({0, nbytes, *cuts})
    assert edges[0] == 0, f"a cut at {edges[0]}"
    assert edges[-1] == nbytes, f"a cut at {edges[-1]} of {nbytes} bytes"
    return tuple(
        Chunk(start, min(start + chunk_bytes, stop))
        for low, stop in pairwise(edges)
        for start in range(low, stop, chunk_bytes)
    )


class PagedArena(ABC):
    """`Arena` without pages of its own kind."""

    def __init__(self, name: str, nbytes: int, chunk_bytes: int, cuts: Sequence[int]) -> None:
        self._name = name
        self._nbytes = nbytes
        self._chunk_bytes, self._cuts = chunk_bytes, tuple(cuts)
        self._there: list[Chunk] = []
        self._mapped = False
        self._adopted = False

    @cached_property
    def _chunks(self) -> tuple[Chunk, ...]:
        return chunks_of(self._nbytes, self._chunk_bytes, self._cuts)

    @property
    def name(self) -> str:
        return self._name

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    @abstractmethod
    def address(self) -> int: ...

    @property
    def mapped(self) -> bool:
        return self._mapped

    @property
    def adopted(self) -> bool:
        return self._adopted

    def map(self, writable: bool = True) -> None:
        self._refuse_if(self._mapped, "map of an arena that is mapped already", "unmap it first, or drop this map")
        self._make(self._chunks, writable)
        self._mapped, self._there = True, list(self._chunks)

    def map_part(self, start: int, stop: int) -> None:
        self._refuse_if(self._adopted, "map of a part of pages that another process owns", "unmap all of it before")
        part = [chunk for chunk in self._chunks if start <= chunk.start and chunk.stop <= stop]
        what = f"map of bytes {start} to {stop}, which are not chunks"
        self._refuse_if(sum(c.nbytes for c in part) != stop - start, what, "reserve it with these cuts")
        what = f"map of bytes {start} to {stop}, of which some are there already"
        self._refuse_if(any(chunk in self._there for chunk in part), what, "unmap them first, or drop this map")
        self._make(part, writable=True)
        self._mapped, self._there = True, sorted([*self._there, *part], key=lambda chunk: chunk.start)

    def unmap(self) -> None:
        self._refuse_if(not self._mapped, "unmap of an arena that is not mapped", "map it first, or drop this unmap")
        self._release(self._there)
        self._mapped, self._adopted, self._there = False, False, []

    def unmap_part(self, start: int, stop: int) -> None:
        self._refuse_if(not self._mapped, "unmap of an arena that is not mapped", "map it first, or drop this unmap")
        self._refuse_if(self._adopted, "unmap of a part of pages that another process owns", "unmap all of it")
        part = [chunk for chunk in self._there if start <= chunk.start and chunk.stop <= stop]
        what = f"unmap of bytes {start} to {stop}, which are not chunks that are there"
        self._refuse_if(sum(c.nbytes for c in part) != stop - start, what, "reserve it with these cuts")
        self._release(part)
        self._there = [chunk for chunk in self._there if chunk not in part]
        self._mapped = bool(self._there)

    def export(self) -> list[int]:
        self._refuse_if(not self._mapped, "export of an arena without pages", "map it first")
        self._refuse_if(self._adopted, "export of pages that another process owns", "export them from their owner")
        self._refuse_if(self._there != list(self._chunks), "export of an arena that has lost a part", "map it again")
        return self._hand_out()

    def adopt(self, fds: Sequence[int], writable: bool = False) -> None:
        owned = list(fds)
        try:
            self._refuse_if(self._mapped, "adopt into an arena that is mapped already", "unmap it first")
            got = self._size_of(owned)
            what = f"adopt of {got} bytes into a range of {self._nbytes} bytes"
            self._refuse_if(got != self._nbytes, what, "reserve the same bytes on both sides")
            self._take(owned, writable)
            self._mapped, self._adopted, self._there = True, True, list(self._chunks)
        finally:
            close_all(owned)

    def inodes(self) -> list[int]:
        """Inodes of the pages behind the range, in order, where pages have some: equal in two processes that share."""
        return []

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        numel = prod(shape)
        stop = offset_bytes + numel * dtype.itemsize
        assert 0 <= offset_bytes <= stop <= self._nbytes, f"{self._name}: view of [{offset_bytes}, {stop}) bytes"
        assert offset_bytes % dtype.itemsize == 0, f"{self._name}: offset {offset_bytes} is not aligned to {dtype}"
        return self._tensor(offset_bytes, tuple(shape), dtype)

    def close(self) -> None:
        # The range itself stays for the views over it, so that a stale one faults instead of reading strangers.
        if self._mapped:
            self.unmap()

    # ---- what pages are made of

    @abstractmethod
    def _make(self, chunks: Sequence[Chunk], writable: bool) -> None:
        """Fresh zero pages behind these chunks; OutOfMemory, and nothing changed, if there are none."""

    @abstractmethod
    def _release(self, chunks: Sequence[Chunk]) -> None:
        """Let the pages of these chunks go, which are there."""

    @abstractmethod
    def _hand_out(self) -> list[int]:
        """New descriptors of the pages, in order."""

    @abstractmethod
    def _size_of(self, fds: Sequence[int]) -> int:
        """Bytes of the pages behind descriptors of another process."""

    @abstractmethod
    def _take(self, fds: Sequence[int], writable: bool) -> None:
        """Lay their pages behind the range; the caller closes the descriptors."""

    @abstractmethod
    def _tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over a part of the range that has been checked."""

    def _refuse_if(self, wrong: bool, what: str, hint: str) -> None:
        if wrong:
            raise PlanError(what, where=self._name, hint=hint)


def round_up(nbytes: int, unit: int) -> int:
    """`nbytes` rounded up to a whole number of `unit`."""
    return -(-nbytes // unit) * unit
