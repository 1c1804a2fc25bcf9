"""Row orders against each other: in how many slabs of a rollout shard a training shard lies.

trainer   [g0 u0]  [g1 u1]          rollout, stacked      [g0 g1 u0 u1]    two slabs a rank: g0 and u0 are apart
                                    rollout, interleaved  [g0 u0 g1 u1]    one slab a rank
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollplex.backends.facts import Block


@dataclass(frozen=True)
class Slab:
    """Rows [start, start + rows) of a rollout shard."""

    start: int
    rows: int

    @property
    def stop(self) -> int:
        """The first row behind it."""
        return self.start + self.rows


def slabs(inner: Sequence[Block], outer: Sequence[Block]) -> tuple[Slab, ...] | None:
    """The slabs of `outer` that hold the rows of `inner` in their order; None where `outer` lacks a row."""
    found: list[Slab] = []
    for block in inner:
        pieces = list(_pieces(block, outer))
        if sum(p.rows for p in pieces) != block.stop - block.start:
            return None
        for piece in pieces:
            if found and found[-1].stop == piece.start:
                found[-1] = Slab(found[-1].start, found[-1].rows + piece.rows)
            else:
                found.append(piece)
    return tuple(found)


def _pieces(block: Block, outer: Iterable[Block]) -> Iterator[Slab]:
    """Where the rows of one block lie, in their order."""
    at, pieces = 0, []
    for b in outer:
        first, last = max(b.start, block.start), min(b.stop, block.stop)
        if b.part == block.part and first < last:
            pieces.append((first, Slab(at + first - b.start, last - first)))
        at += b.stop - b.start
    yield from (slab for _, slab in sorted(pieces, key=lambda p: p[0]))


def parts(blocks: Iterable[Block]) -> int:
    """Different parts (gate, up, ..) of a shard."""
    return len({b.part for b in blocks})


def rows(blocks: Iterable[Block]) -> int:
    """Rows of a shard."""
    return sum(b.stop - b.start for b in blocks)


def same_rows(one: Sequence[Block], other: Sequence[Block]) -> bool:
    """Whether two shards hold the same rows, in whatever order."""
    return rows(one) == rows(other) and slabs(one, other) is not None


def missing(needed: Sequence[Block], owned: Sequence[Block]) -> int:
    """Rows of `needed` that are not among `owned`."""
    return rows(needed) - sum(slab.rows for block in needed for slab in _pieces(block, owned))
