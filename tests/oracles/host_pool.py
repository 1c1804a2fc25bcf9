"""Static offsets by enumeration: every order in which items can be stacked, and any offsets, legal or not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from oracles.base import Oracle, Order, solve
from rollplex.passes.offsets import FAMILIES, Model
from rollplex.passes.offsets_data import Item
from rollplex.passes.solver import Family, constrain


@dataclass(frozen=True)
class Instance:
    """Items, offsets for all of them, and a size of the pool."""

    items: tuple[Item, ...]
    offsets: tuple[int, ...]
    size: int

    @property
    def most(self) -> int:
        """A pool in which nothing needs to share an address."""
        return sum(i.size for i in self.items)


def meet(a: Item, b: Item) -> bool:
    """Whether two items are alive at one time."""
    return any(max(p, r) < min(q, s) for p, q in a.spans for r, s in b.spans)


def legal(one: Instance, offsets: Sequence[int], size: int) -> bool:
    """Inside the pool, apart where they meet, and what is alike in the order in which it is listed."""
    placed = list(zip(one.items, offsets, strict=True))
    if any(a + i.size > size for i, a in placed):
        return False
    for (i, a), (j, b) in itertools.combinations(placed, 2):
        if (i.size, i.spans) == (j.size, j.spans):
            if a + i.size > b:
                return False
        elif meet(i, j) and a < b + j.size and b < a + i.size:
            return False
    return True


def least(one: Instance) -> int:
    """The smallest pool: in the order of a best packing, each item rests on the highest before it that it meets."""
    return min(_stacked(order) for order in itertools.permutations(one.items))


def _stacked(order: Sequence[Item]) -> int:
    tops: list[int] = []
    for n, item in enumerate(order):
        tops.append(item.size + max((tops[k] for k in range(n) if meet(order[k], item)), default=0))
    return max(tops)


# ---- instances


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """Two to four items of few sizes and lives, so that some are alike, and offsets that are seldom quite legal."""
    lives = st.sampled_from((((0, 2),), ((1, 3),), ((2, 4),), ((0, 1), (2, 3))))
    found = tuple(Item(f"i{k}", draw(st.integers(1, 2)), draw(lives)) for k in range(draw(st.integers(2, 4))))
    most = sum(i.size for i in found)
    offsets = tuple(draw(st.integers(0, most - i.size)) for i in found)
    return Instance(found, offsets, draw(st.integers(0, most)))


# ---- the oracle


def disagreement(one: Instance, families: Sequence[Family[Model]], order: Order) -> str:
    """In the optimum, in whether the solution is legal, or about the instance's own offsets."""
    return _optimum(one, families, order) or _one(one, families)


def _optimum(one: Instance, families: Sequence[Family[Model]], order: Order) -> str:
    model = constrain(Model(one.items, one.most), families)
    solution, got = solve(model.cp, order(model.objectives()))
    if solution is None:
        return "not solvable"
    if not legal(one, [solution.value(a) for a in model.at], got["pool bytes"]):
        return "the solution is an illegal packing"
    want = least(one)
    return "" if got["pool bytes"] == want else f"optimum: {got['pool bytes']}, by enumeration {want}"


def _one(one: Instance, families: Sequence[Family[Model]]) -> str:
    model = constrain(Model(one.items, one.most), families)
    for a, value in zip(model.at, one.offsets, strict=True):
        model.cp.add(a == value)
    model.cp.add(model.size <= one.size)
    solution, _ = solve(model.cp, model.objectives())
    right = legal(one, one.offsets, one.size)
    return "" if right == (solution is not None) else f"offsets that are {'legal' if right else 'illegal'}"


HOST_POOL = Oracle("host-pool", FAMILIES, ("pool bytes",), instances(), disagreement)
