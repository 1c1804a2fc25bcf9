"""Static offsets in one pool: no two items overlap in time and address, and the pool is as small as can be.

Data        i        item                            s[i]   its size
            Q        maximal sets of items that are alive at one time (two items meet if some Q has both)
            L        the most that is alive at once, max_Q sum s[i]
Variables   a[i]     offset                          H      size of the pool
Constraints (1)  a[i] + s[i] <= H                    for each i
            (2)  [a[i], a[i] + s[i])                 disjoint, over the items i of each Q
            (3)  a[i] + s[i] <= a[j]                 i before j, of equal size and equal life: they may change places
Objective   H, which is at least L
Before the search: an item that meets every other cuts the address range in two for all of them, so the others can move
together and it lies at the bottom; items that never meet, not even through others, are packed apart, all from the same
base. First fit (`first_fit.py`) gives a packing to start from, and is proven by L where it reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ortools.sat.python import cp_model

from rollplex.ir.plan import SolverResult
from rollplex.passes.first_fit import FirstFit
from rollplex.passes.offsets_data import Item, cliques, components, load, throughout
from rollplex.passes.solver import Family, Objective, constrain, minimise

ROUNDS = 20
"""Rounds of first fit before the search: microseconds for the tens of items of a job."""


@dataclass(frozen=True)
class Packing:
    """Offsets by name; `bound` is a size that no packing can be below."""

    offsets: dict[str, int]
    size: int
    bound: int

    @property
    def proven(self) -> bool:
        """Whether no smaller pool exists."""
        return self.size == self.bound


class Model:
    """The variables of the docstring; `most` is a size of the pool that is known to do; `FAMILIES` constrain it."""

    def __init__(self, items: Sequence[Item], most: int, least: int = 0) -> None:
        self.items, self.most, self.cp = tuple(items), most, cp_model.CpModel()
        self.size = self.cp.new_int_var(max(least, load(items)), most, "H")
        self.at = [self.cp.new_int_var(0, most - item.size, f"a[{item.name}]") for item in self.items]
        self.range = [
            self.cp.new_fixed_size_interval_var(a, item.size, f"[{item.name}]")
            for a, item in zip(self.at, self.items, strict=True)
        ]

    def objectives(self) -> list[Objective]:
        """The one objective."""
        return [Objective("pool bytes", self.size)]

    def start_from(self, offsets: Sequence[int]) -> None:
        """Begin the search at a packing."""
        for a, value in zip(self.at, offsets, strict=True):
            self.cp.add_hint(a, value)
        self.cp.add_hint(self.size, self.most)


def inside(m: Model) -> None:
    """(1)."""
    for a, item in zip(m.at, m.items, strict=True):
        m.cp.add(a + item.size <= m.size)


def disjoint(m: Model) -> None:
    """(2)."""
    for clique in cliques(m.items):
        m.cp.add_no_overlap(m.range[i] for i in clique)


def equals_in_order(m: Model) -> None:
    """(3)."""
    alike: dict[tuple[int, tuple[tuple[int, int], ...]], list[int]] = {}
    for i, item in enumerate(m.items):
        alike.setdefault((item.size, item.spans), []).append(i)
    for group in alike.values():
        for i, j in pairwise(group):
            m.cp.add(m.at[i] + m.items[i].size <= m.at[j])


FAMILIES: tuple[Family[Model], ...] = (
    Family(1, "items lie inside the pool", inside),
    Family(2, "items that meet are disjoint", disjoint),
    Family(3, "equal items in order", equals_in_order),
)


def pack(items: Sequence[Item], *, seconds: float, seed: int) -> Packing:
    """The smallest packing found within the solver's deterministic time, with its bound; sizes in any unit."""
    if not items:
        return Packing({}, 0, 0)
    unit = math.gcd(*(item.size for item in items))
    found = _pack([replace(item, size=item.size // unit) for item in items], seconds, seed)
    return Packing({name: a * unit for name, a in found.offsets.items()}, found.size * unit, found.bound * unit)


def _pack(items: list[Item], seconds: float, seed: int) -> Packing:
    """Bottom first, then every part that is left above it."""
    bottom, base, offsets = throughout(items), 0, {}
    for item in bottom:
        offsets[item.name] = base
        base += item.size
    rest = [item for item in items if item not in bottom]
    parts = components(rest)
    if not bottom and len(parts) == 1:
        return _search(items, seconds, seed)
    tops = [_pack(part, seconds, seed) for part in parts]
    for top in tops:
        offsets |= {name: base + a for name, a in top.offsets.items()}
    size, bound = (base + max((t[k] for t in ((p.size, p.bound) for p in tops)), default=0) for k in (0, 1))
    return Packing(offsets, size, bound)


def _search(items: list[Item], seconds: float, seed: int) -> Packing:
    """One part that cannot be taken apart."""
    fit, least = FirstFit(tuple(items)), load(items)
    offsets = fit.search(least, ROUNDS, seed)
    if (most := fit.top(offsets)) > least:
        model = constrain(Model(items, most), FAMILIES)
        model.start_from(offsets)
        solution = minimise(model.cp, "host-pool", model.objectives(), seconds=seconds, seed=seed)
        assert solution is not None, "first fit found a packing"
        offsets, most, least = [solution.value(a) for a in model.at], *_value_and_bound(solution.results[0])
    return Packing({item.name: a for item, a in zip(items, offsets, strict=True)}, most, least)


def _value_and_bound(result: SolverResult) -> tuple[int, int]:
    return round(result.value), round(result.bound)
