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
from functools import lru_cache
from operator import itemgetter
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
class Cuts:
    """All that decides where an update is cut: the same in most jobs that a search for what fits tries.

    `parameters` of a rank, `stretches` as parameters and bytes of the snapshot up to the end of each, in whole pages,
    the `least` bytes of a piece, and the bytes of both objects.
    """

    parameters: int
    stretches: tuple[Range, ...]
    state_itemsize: int
    page_bytes: int
    least: int
    snapshot: int
    gradients: int

    @classmethod
    def of(cls, job: Job, snapshot: int, gradients: int) -> Cuts:
        """Those of a job's policy."""
        page = job.device.page_bytes
        ends = tuple((own, pages(shared * job.itemsize, page)) for own, shared in stretches(job))
        least = page if job.on_host else LEAST_PIECE_BYTES
        total = updated_parameters(job, job.policy)
        return cls(total, ends, state_itemsize(job), page, least, snapshot, gradients)


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


def rewritten(cuts: Cuts, elements: int) -> tuple[Rewritten, ...]:
    """The policy's chunks of so many elements, in whole pages."""
    return tuple(Rewritten(start, stop, comes, goes) for start, stop, comes, goes in _chunks(cuts, elements))


def _chunks(cuts: Cuts, elements: int) -> Iterator[tuple[int, int, Range, Range]]:
    here = gone = 0
    for start, stop, end in _ends(cuts, elements):
        last = stop == cuts.parameters
        come = cuts.snapshot if last else min(cuts.snapshot, max(end, here + cuts.least)) if end > here else here
        used = min(cuts.gradients, stop * cuts.state_itemsize // cuts.page_bytes * cuts.page_bytes)
        go = cuts.gradients if last else used if used - gone >= cuts.least else gone
        yield start, stop, (here, come), (gone, go)
        here, gone = come, go


def _ends(cuts: Cuts, elements: int) -> Iterator[tuple[int, int, int]]:
    """Every chunk, and the end of the stretch that it writes into last, in bytes of whole pages."""
    parts = iter(cuts.stretches)
    own, end = next(parts)
    for start in range(0, cuts.parameters, elements):
        stop = min(start + elements, cuts.parameters)
        while own < stop and (following := next(parts, None)):
            own, end = following
        yield start, stop, min(cuts.snapshot, end)


def moments(chunks: tuple[Rewritten, ...], gradients: int) -> Iterator[Moment]:
    """What is there of both while each chunk is updated; its gradients are, its pages too."""
    for chunk in chunks:
        yield Moment(chunk.comes[1], gradients - chunk.goes[0])


@lru_cache(maxsize=4096)
def fullest(cuts: Cuts, elements: int) -> Moment:
    """The first moment at which most is there of snapshot and gradients."""
    held = ((come + cuts.gradients - gone, come, gone) for _, _, (_, come), (gone, _) in _chunks(cuts, elements))
    _, come, gone = max(held, key=itemgetter(0))
    return Moment(come, cuts.gradients - gone)
