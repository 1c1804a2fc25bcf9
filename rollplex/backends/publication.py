"""Which version of the weights lies in shared pages: a stamp beside them that readers look at before and after.

    trainer    chunk 0 .. n-1  exchange  rebuild  publish         stamp   theta_k | theta_k+1 after 3 chunks | theta_k+1
    rollout    with readable(version): generate                   refuses what is not whole, or not the one it expects

Trainer and rollout count publications each by itself, so a stamp that is late or early is noticed. That costs a few
bytes a chunk and a few a rollout. Under `run.verify_weights` the stamp has a digest of the pages too, which the reader
takes again: bytes that nobody published are noticed as well. Paper section 3.3, binding and refresh.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rollplex.ir.errors import EngineError

_FORMAT = struct.Struct("<qq64s")
_HINT = "end the run and start again: a process has written weights, or published them, out of turn"


@dataclass(frozen=True)
class Stamp:
    """Version `version` is whole if no chunk of the next one is `written`; `digest` is that of its pages, or ""."""

    version: int = 0
    written: int = 0
    digest: str = ""

    def __str__(self) -> str:
        after = f" and {self.written} chunks of theta_{self.version + 1}" if self.written else ""
        return f"theta_{self.version}{after}"


class StampPage:
    """The page that has the stamp; it goes with the last process that maps it."""

    def __init__(self, fd: int, writable: bool) -> None:
        """The descriptor is taken over."""
        self._fd = fd
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._page = mmap.mmap(fd, mmap.PAGESIZE, prot=protection)

    @classmethod
    def create(cls) -> StampPage:
        """A new page, for the process that writes the weights."""
        fd = os.memfd_create("rollplex-stamp", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        return cls(fd, writable=True)

    def export(self) -> int:
        """A new descriptor to send to a reader; the caller closes it."""
        return os.dup(self._fd)

    def read(self) -> Stamp:
        version, written, digest = _FORMAT.unpack_from(self._page)
        return Stamp(version, written, digest.rstrip(b"\0").decode())

    def write(self, stamp: Stamp) -> None:
        _FORMAT.pack_into(self._page, 0, stamp.version, stamp.written, stamp.digest.encode())

    def close(self) -> None:
        self._page.close()
        os.close(self._fd)


Digest = Callable[[], str]


class Publication:
    """The writer's side; `digest` hashes the pages that readers see, or is None where nobody asked for it."""

    def __init__(self, digest: Digest | None) -> None:
        self._digest = digest
        self.page = StampPage.create()

    def start(self) -> None:
        """The pages hold weights that no update of this process made: the initial ones, or a checkpoint's."""
        self.page.write(Stamp(digest=self._hashed()))

    def writing(self, chunk: int) -> None:
        """Chunk number `chunk` of the next version is about to be written."""
        self.page.write(Stamp(self.page.read().version, chunk + 1))

    def publish(self) -> None:
        """Everything that readers see is of the next version."""
        self.page.write(Stamp(self.page.read().version + 1, digest=self._hashed()))

    def _hashed(self) -> str:
        return self._digest() if self._digest else ""


class Subscription:
    """The reader's side of what process `owner` publishes, over the page whose descriptor it sent."""

    def __init__(self, fd: int, owner: str, digest: Digest) -> None:
        self.page = StampPage(fd, writable=False)
        self._owner, self._digest = owner, digest

    @contextmanager
    def readable(self, version: int) -> Iterator[None]:
        """The block reads version `version`, whole, from its start to its end; EngineError if it would not."""
        stamp = self._checked(version)
        if stamp.digest and (found := self._digest()) != stamp.digest:
            what = f"the pages of theta_{version} are not those that were published: "
            raise self._refused(f"{what}digest {found[:16]}.., published {stamp.digest[:16]}..")
        yield
        self._checked(version)

    def close(self) -> None:
        self.page.close()

    def _checked(self, version: int) -> Stamp:
        stamp = self.page.read()
        if stamp.written:
            raise self._refused(f"the weights are a mixture: {stamp} were written, and not published")
        if stamp.version != version:
            raise self._refused(f"the weights are {stamp}, and theta_{version} is due")
        return stamp

    def _refused(self, what: str) -> EngineError:
        return EngineError(what, where=f"pages of {self._owner}", hint=_HINT)
