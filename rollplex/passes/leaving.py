"""Gradients that leave HBM piece by piece, beside the backward that makes them final: which pieces, what is exposed.

last prefix backward    | layer L-1 ..      layer 0, embedding |  tower  |
language pieces               0     1     2        3           |         |     from the end of the part to its beginning
tower pieces                                                   |   4  5  |
the link                      [ 0 ][ 1 ][ 2 ]   [ 3 ]             [4][5 ]      5 ends behind the backward: exposed

Parameters lie in the order of the forward, embedding first, the tower behind the language model. Pieces are whole
pages and nearly equal; a page in which two pieces meet leaves with the later one. Paper section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollplex.ir.job import Job
from rollplex.ir.lora import trained_parts, trained_spec
from rollplex.ir.shards import rank_parameters
from rollplex.ir.work import turn_work
from rollplex.passes.costs import Costs
from rollplex.passes.update_sizes import state_itemsize

PIECE_S = 2e-5
"""What a piece costs beside its bytes: an event, a copy that starts, pages unmapped. Assumed, not measured."""
LEAST_GAIN_S = 2e-6
"""Less is noise, and would be told as nothing."""
NEAR = 0.02
"""The fewest pieces are taken whose exposed time is that near to the least, as a share of the whole."""
COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of pieces that are tried."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """Bytes [start, stop) of the gradients, in whole pages, and how long the backward takes through them."""

    start: int
    stop: int
    seconds: float


@dataclass(frozen=True)
class Leaving:
    """Pieces in the order in which they become final; seconds on the link as one, and seconds behind the backward."""

    pieces: tuple[Range, ...]
    whole_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """What leaving in pieces takes off a step."""
        return self.whole_s - self.exposed_s


def leaving(job: Job, role: str, nbytes: int) -> Leaving | None:
    """As many pieces as it takes to have nearly the least exposed time; None where that is no gain."""
    costs, parts = Costs(job), _parts(job, role, nbytes)
    whole_s = costs.link_s(nbytes)
    cuts = (_cut(parts, count, job.device.page_bytes) for count in COUNTS)
    tried = [Leaving(pieces, whole_s, exposed_s(parts, pieces, costs)) for pieces in cuts]
    least = min(found.exposed_s for found in tried)
    best = next(found for found in tried if found.exposed_s <= least + NEAR * whole_s)
    return best if best.hidden_s >= LEAST_GAIN_S else None


def exposed_s(parts: Sequence[Part], pieces: Sequence[Range], costs: Costs) -> float:
    """Seconds from the end of the backward to that of the last piece: each waits for its layers and for the link."""
    free = began = 0.0
    for part in parts:
        for start, stop in (p for p in pieces if part.start <= p[0] < part.stop):
            final = began + part.seconds * (part.stop - start) / (part.stop - part.start)
            free = max(free, final) + costs.link_s(stop - start) + PIECE_S
        began += part.seconds
    return max(0.0, free - began)


def _parts(job: Job, role: str, nbytes: int) -> tuple[Part, ...]:
    """Language model and tower in the order of the backward, those that are trained."""
    language_s, tower_s = Costs(job).prefix_backward_s(turn_work(job, role, 1))
    page, names = job.device.page_bytes, trained_parts(job, role)
    held = rank_parameters(trained_spec(job, role), job.degrees(role), "language") if "language" in names else 0
    edge = nbytes if "vision" not in names else min(nbytes, held * state_itemsize(job) // page * page)
    parts = (Part(0, edge, language_s), Part(edge, nbytes, tower_s))
    return tuple(p for p in parts if p.start < p.stop)


def _cut(parts: Sequence[Part], count: int, page: int) -> tuple[Range, ...]:
    """About `count` pieces: each part has its share of them, and at least one."""
    total = sum(p.stop - p.start for p in parts)
    return tuple(r for p in parts for r in _pieces(p, round(count * (p.stop - p.start) / total), page))


def _pieces(part: Part, count: int, page: int) -> Iterator[Range]:
    pages = (part.stop - part.start) // page
    count = max(1, min(count, pages))
    edges = [part.start + page * (pages * i // count) for i in range(count)] + [part.stop]
    yield from reversed(list(pairwise(edges)))
