"""Items that need an address range for some times: who meets whom, loads, cliques, and independent parts.

time      0   1   2   3   4          a is alive over all of it: it lies at the bottom of some best packing
a         ################           without a, nothing crosses time 2: b and c are packed apart from d
b, c      ####### #####
d                     ####
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Item:
    """`size` units of address space in every one of its half-open spans of time."""

    name: str
    size: int
    spans: tuple[tuple[int, int], ...]

    @property
    def life(self) -> int:
        """Time units that it is alive."""
        return sum(stop - start for start, stop in self.spans)

    def alive(self, time: int) -> bool:
        """Whether it needs its addresses at a time."""
        return any(start <= time < stop for start, stop in self.spans)


def times(items: Sequence[Item]) -> tuple[int, ...]:
    """Where items begin or end, in order."""
    return tuple(sorted({t for item in items for span in item.spans for t in span}))


def sections(items: Sequence[Item]) -> Iterator[tuple[int, ...]]:
    """The items alive from one of `times` to the next; together they are all that is ever alive at once."""
    for start, _ in pairwise(times(items)):
        yield tuple(i for i, item in enumerate(items) if item.alive(start))


def cliques(items: Sequence[Item]) -> list[tuple[int, ...]]:
    """Sections that are not part of another: any two items that meet are in one of them."""
    found = sorted({frozenset(s) for s in sections(items)}, key=lambda s: (-len(s), sorted(s)))
    kept: list[frozenset[int]] = []
    for section in found:
        if not any(section <= other for other in kept):
            kept.append(section)
    return [tuple(sorted(s)) for s in kept]


def overlaps(items: Sequence[Item]) -> list[tuple[int, int]]:
    """Pairs i < j that are alive at some time together."""
    return sorted({(i, j) for clique in cliques(items) for i in clique for j in clique if i < j})


def load(items: Sequence[Item]) -> int:
    """The most that is alive at once: no packing is lower."""
    return max((sum(items[i].size for i in section) for section in sections(items)), default=0)


def components(items: Sequence[Item]) -> list[list[Item]]:
    """Items in parts that never meet in time."""
    left, found = list(range(len(items))), []
    meets: dict[int, set[int]] = {i: set() for i in left}
    for i, j in overlaps(items):
        meets[i].add(j)
        meets[j].add(i)
    while left:
        part, todo = set(), [left[0]]
        while todo:
            if (i := todo.pop()) not in part:
                part.add(i)
                todo += meets[i] - part
        found.append([items[i] for i in sorted(part)])
        left = [i for i in left if i not in part]
    return found


def throughout(items: Sequence[Item]) -> list[Item]:
    """Items that meet every other."""
    return [item for i, item in enumerate(items) if all(i in section for section in sections(items) if section)]
