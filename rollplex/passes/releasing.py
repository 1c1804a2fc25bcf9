"""The snapshot's pages around an update that makes them again: gone behind theta-quiet, back chunk by chunk.

chunk        0      1      2      3         masters are at the host, or in HBM; every chunk in flight has its workspace
snapshot    [##    [###   [#####[######]    what the chunks so far have written, up to the end of a stretch of layers
gradients   ####]   ###]   ##]    #]        where they are in HBM, those of chunks that are done have left

Both are cut into whole pages, of pieces that are large enough for the driver. A plan counts the bytes of the fullest
moment: what has come of the one and is left of the other. Paper section 3.2, optimizer streaming.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rollplex.ir.job import Job
from rollplex.ir.releasing import not_releasable, stretches
from rollplex.passes.update_sizes import pages, state_itemsize
from rollplex.passes.work import updated_parameters

LEAST_PIECE_BYTES = 64 << 20
"""Of a GPU: handles of 2 MiB cost 60 times more for each byte than those of 256 MiB (paper 3.2 names no size)."""
Range = tuple[int, int]
Choice = Literal["keep", "release"]


@dataclass(frozen=True)
class Rewritten:
    """One chunk: elements [start, stop), the snapshot's pages that come before it, the gradients' that go behind it."""

    start: int
    stop: int
    comes: Range
    goes: Range


@dataclass(frozen=True)
class Moment:
    """What is in HBM while a chunk is updated."""

    snapshot: int
    gradients: int

    def held(self, gradients: bool) -> int:
        """Bytes of both, if the gradients are in HBM at all."""
        return self.snapshot + (self.gradients if gradients else 0)


def choices(job: Job) -> tuple[Choice, ...]:
    """What the job leaves to the solver, the cheaper first."""
    wanted = job.optimizer.snapshot
    if wanted == "auto":
        return ("keep",) if not_releasable(job) else ("keep", "release")
    return (wanted,)


def rewritten(job: Job, elements: int, snapshot: int, gradients: int) -> tuple[Rewritten, ...]:
    """The policy's chunks of so many elements over objects of these bytes, in whole pages."""
    least = job.device.page_bytes if job.on_host else LEAST_PIECE_BYTES
    ends, found = list(_ends(job, elements, snapshot)), list[Rewritten]()
    here = gone = 0
    for start, stop, end in ends:
        last = stop == ends[-1][1]
        come = snapshot if last else min(snapshot, max(end, here + least)) if end > here else here
        used = min(gradients, stop * state_itemsize(job) // job.device.page_bytes * job.device.page_bytes)
        go = gradients if last else used if used - gone >= least else gone
        found.append(Rewritten(start, stop, (here, come), (gone, go)))
        here, gone = come, go
    return tuple(found)


def _ends(job: Job, elements: int, snapshot: int) -> Iterator[tuple[int, int, int]]:
    """Every chunk, and the end of the stretch that it writes into last, in bytes of whole pages."""
    total, parts = updated_parameters(job, job.policy), iter(stretches(job))
    own, shared = next(parts)
    for start in range(0, total, elements):
        stop = min(start + elements, total)
        while own < stop and (following := next(parts, None)):
            own, shared = following
        yield start, stop, min(snapshot, pages(shared * job.itemsize, job.device.page_bytes))


def moments(chunks: tuple[Rewritten, ...], gradients: int) -> Iterator[Moment]:
    """What is there of both while each chunk is updated; its gradients are, its pages too."""
    for chunk in chunks:
        yield Moment(chunk.comes[1], gradients - chunk.goes[0])


def fullest(job: Job, elements: int, snapshot: int, gradients: int) -> Moment:
    """The first moment at which most is there of snapshot and gradients."""
    found = moments(rewritten(job, elements, snapshot, gradients), gradients)
    return max(found, key=lambda moment: moment.held(gradients > 0))
