"""Which prefix work runs beside which part of decode: a search over tables of sharing, exact where it is small enough.

Data        r = 1 .. R            parts of decode in the order of time
            m = 1 .. M            ways to run prefix work beside it; one of them is to wait
            H[r,m]                prefix work that part r hides if way m runs until its end (seconds it takes alone)
            C[r,m]                what that costs decode, seconds; of a part that hides h of it C[r,m] h / H[r,m]
            P                     prefix work of the step, seconds
Variables   m[r]                  one way for each part
Where       h[r] = min(H[r,m[r]], P - h[1] - .. - h[r-1])                prefixes run until none is left
Minimise    sum_r C[r,m[r]] h[r] / H[r,m[r]]  -  sum_r h[r]              decode's slowdown less what is hidden

A beginning m[1] .. m[r] is a point (hidden, cost). It is given up where another hides no less and costs no more, since
whatever follows it would follow the other; and where the relaxation that may take fractions of ways, the cheapest
first, cannot bring it below the best table known. Both keep an optimum (a multiple-choice knapsack with one item cut;
Sinha and Zoltners, Operations Research 27, 1979). The best table known at first is a guess, changed part by part until
no change of one part is better: the closer it is, the fewer points remain.

The knapsack is hard, and parts that are nearly alike leave points that nothing tells apart. Of those of one part at
most POINTS go on, the ones that the relaxation lets end first. The table is an optimum if none that was left out could
have ended sooner; else it is told with what the relaxation says of all tables, and no change of one part is better:

    128 responses of an H200's job, 9.3 s of decode      an optimum
    the same, unfinished ones carried over               at most 2.6 ms from one
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

TINY = 1e-9
"""Seconds that count as nothing."""
POINTS = 2000
"""Points of a part that go on to the next: of 32 parts with 5 ways each 320,000 are looked at, at most."""


class Option(NamedTuple):
    """What a way does in a part of decode: H and C."""

    hidden: float
    cost: float


class Point(NamedTuple):
    """A beginning of a table: prefix work hidden, what it cost, and the ways."""

    hidden: float
    cost: float
    table: tuple[int, ...]


Options = tuple[tuple[Option, ...], ...]
"""The ways of every part."""


class Best(NamedTuple):
    """A table, and by how many seconds some other could be better: none where the table is an optimum."""

    table: tuple[int, ...]
    gap: float


@lru_cache(maxsize=16)
def best_table(options: Options, prefix_s: float, most: int = POINTS) -> Best:
    """The way m[r] of each part under which decode and prefixes end first, with at most so many points a part.

    Every pass that tells the step's seconds asks for the same table: the last few are kept.
    """
    guessed = min(_guesses(options), key=lambda table: objective(options, prefix_s, table))
    known = settled(options, prefix_s, guessed)
    found, left_out = _search(options, prefix_s, most, objective(options, prefix_s, known))
    table = settled(options, prefix_s, found) if found else known
    least = objective(options, prefix_s, table)
    proven = left_out > least - TINY
    return Best(table, 0.0 if proven else max(least + Relaxation.of(options).gain(prefix_s), 0.0))


def _search(options: Options, prefix_s: float, most: int, least: float) -> tuple[tuple[int, ...] | None, float]:
    """A table below `least`, if one is found, and the least that one could have come to that was left out."""
    points, left_out = [Point(0.0, 0.0, ())], math.inf
    for r, ways in enumerate(options):
        rest = Relaxation.of(options[r + 1 :])
        grown = _undominated(_grown(point, ways, prefix_s) for point in points)
        ends = [(p.cost - p.hidden - rest.gain(prefix_s - p.hidden), p) for p in grown]
        ends = sorted(end for end in ends if end[0] < least - TINY)
        points = [p for _, p in ends[:most]]
        left_out = min([left_out, *(could for could, _ in ends[most : most + 1])])
    found = min(points, key=lambda p: p.cost - p.hidden, default=None)
    return (found.table if found else None), left_out


def settled(options: Options, prefix_s: float, table: Sequence[int]) -> tuple[int, ...]:
    """The table changed, the best change of one part first, until none is better; each brings TINY at least."""
    while True:
        table = _prolonged(options, prefix_s, table)
        best = min(_neighbours(options, table), key=lambda other: objective(options, prefix_s, other))
        if objective(options, prefix_s, best) > objective(options, prefix_s, table) - TINY:
            return table
        table = best


def _neighbours(options: Options, table: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return ((*table[:r], m, *table[r + 1 :]) for r, ways in enumerate(options) for m in range(len(ways)))


def _prolonged(options: Options, prefix_s: float, table: Sequence[int]) -> tuple[int, ...]:
    """Behind the last prefix any way is as good: should some be left after all, the cheapest for a second hidden is."""
    point, ways = Point(0.0, 0.0, ()), list[int]()
    for of_part, m in zip(options, table, strict=True):
        ways.append(m if prefix_s - point.hidden > TINY else _cheapest(of_part))
        point = _then(point, of_part[m], m, prefix_s)
    return tuple(ways)


def _cheapest(ways: Sequence[Option]) -> int:
    """The way that costs decode least for what it hides; to wait, where each costs more than it hides."""
    worth = [m for m, way in enumerate(ways) if way.hidden > way.cost]
    return min(worth, key=lambda m: ways[m].cost / ways[m].hidden, default=0)


def objective(options: Sequence[Sequence[Option]], prefix_s: float, table: Sequence[int]) -> float:
    """Decode's slowdown less the prefix work that is hidden."""
    point = Point(0.0, 0.0, ())
    for ways, m in zip(options, table, strict=True):
        point = _then(point, ways[m], m, prefix_s)
    return point.cost - point.hidden


def _then(point: Point, way: Option, m: int, prefix_s: float) -> Point:
    left = prefix_s - point.hidden
    share = min(1.0, left / way.hidden) if way.hidden else 0.0
    return Point(point.hidden + share * way.hidden, point.cost + share * way.cost, (*point.table, m))


def _grown(point: Point, ways: Sequence[Option], prefix_s: float) -> Iterator[Point]:
    return (_then(point, way, m, prefix_s) for m, way in enumerate(ways))


def _undominated(groups: Iterable[Iterable[Point]]) -> Iterator[Point]:
    """Points that no other hides as much as for less; of equal ones the first table."""
    least = math.inf
    for point in sorted((p for group in groups for p in group), key=lambda p: (-p.hidden, p.cost, p.table)):
        if point.cost < least:
            least = point.cost
            yield point


def _guesses(options: Sequence[Sequence[Option]]) -> Iterator[tuple[int, ...]]:
    """One way throughout; and of each part the way that hides most at a price of so much for a second hidden."""
    for m in range(len(options[0])):
        yield (m,) * len(options)
    for tenth in range(11):
        price = tenth / 10
        yield tuple(max(range(len(ways)), key=lambda m, w=ways: price * w[m].hidden - w[m].cost) for ways in options)


@dataclass(frozen=True)
class Relaxation:
    """Parts of which fractions of ways may be taken: most that can be gained by what is hidden, in whole seconds.

    `hidden` and `gained` are sums over increments in the order of their price.
    """

    hidden: tuple[float, ...]
    gained: tuple[float, ...]
    slopes: tuple[float, ...]

    @classmethod
    def of(cls, options: Sequence[Sequence[Option]]) -> Relaxation:
        """Of the parts with these ways."""
        increments = sorted((step for ways in options for step in _hull(ways)), key=lambda s: s.cost / s.hidden)
        hidden, gained = [0.0], [0.0]
        for step in increments:
            hidden.append(hidden[-1] + step.hidden)
            gained.append(gained[-1] + step.hidden - step.cost)
        return cls(tuple(hidden), tuple(gained), tuple(1 - s.cost / s.hidden for s in increments))

    def gain(self, left: float) -> float:
        """The most that hiding at most `left` can bring: what is hidden less its cost."""
        left = max(left, 0.0)
        i = bisect_right(self.hidden, left) - 1
        return self.gained[i] + ((left - self.hidden[i]) * self.slopes[i] if i < len(self.slopes) else 0.0)


def _hull(ways: Sequence[Option]) -> Iterator[Option]:
    """Increments between the ways of one part that no mixture of others beats, as far as each brings a gain."""
    at = Option(0.0, 0.0)
    while True:
        beyond = [w for w in ways if w.hidden > at.hidden + TINY]
        if not beyond:
            return
        best = min(beyond, key=lambda w: ((w.cost - at.cost) / (w.hidden - at.hidden), -w.hidden))
        step = Option(best.hidden - at.hidden, best.cost - at.cost)
        if step.cost >= step.hidden:
            return
        yield step
        at = best
