"""The search for a table of sharing agrees with enumeration, written down once more from what happens in time.

part 1 |== decode, prefixes on 80 SMs ==|      prefix work is done at its rate while there is any; decode goes on at
part 2 |== decode, prefixes wait =======|      its own pace in what is left of the part
"""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.passes.co_run_search import Option, Relaxation, best_table, objective

Parts = list[tuple[float, list[tuple[float, float]]]]
"""(seconds alone, [(slowdown, rate) of each way])."""


def seconds_of(parts: Parts, prefix_s: float, table: tuple[int, ...]) -> float:
    """Event by event: how long decode and prefixes take, prefix work being done as the table says."""
    now, todo = 0.0, prefix_s
    for (alone_s, ways), m in zip(parts, table, strict=True):
        slower, rate = ways[m]
        if rate == 0:
            now += alone_s
            continue
        beside_s = min(alone_s * slower, todo / rate)  # until the part ends or nothing is left
        todo -= beside_s * rate
        now += beside_s + (alone_s - beside_s / slower)
    return now + max(todo, 0.0)


def options_of(parts: Parts) -> list[list[Option]]:
    return [[Option(a * s * v, a * (s - 1)) for s, v in ways] for a, ways in parts]


WAYS = st.tuples(st.floats(1.0, 4.0), st.floats(0.05, 1.0))
PARTS = st.integers(1, 3).flatmap(
    lambda ways: st.lists(
        st.tuples(st.floats(0.1, 10.0), st.lists(WAYS, min_size=ways, max_size=ways).map(lambda w: [(1.0, 0.0), *w])),
        min_size=1,
        max_size=4,
    )
)


@settings(max_examples=300, deadline=None)
@given(PARTS, st.floats(0.0, 40.0))
def test_no_table_is_better(parts: Parts, prefix_s: float) -> None:
    options = options_of(parts)
    found = best_table(options, prefix_s)
    tables = product(range(len(parts[0][1])), repeat=len(parts))
    least = min(seconds_of(parts, prefix_s, table) for table in tables)
    assert seconds_of(parts, prefix_s, found) == pytest.approx(least, rel=1e-9, abs=1e-8)
    alone = sum(a for a, _ in parts) + prefix_s
    assert alone + objective(options, prefix_s, found) == pytest.approx(least, rel=1e-9, abs=1e-8)


@settings(max_examples=200, deadline=None)
@given(PARTS, st.floats(0.0, 40.0))
def test_the_relaxation_is_a_bound(parts: Parts, prefix_s: float) -> None:
    """Fractions of ways gain no less than any table."""
    options = options_of(parts)
    gain = Relaxation.of(options).gain(prefix_s)
    for table in product(range(len(parts[0][1])), repeat=len(parts)):
        assert -objective(options, prefix_s, table) <= gain + 1e-9


def test_the_tail_is_taken_where_it_is_cheaper() -> None:
    """Both parts could hide all 4 s; in the first a second hidden costs 0.5 s, in the second 0.1 s."""
    options = [[Option(0, 0), Option(4, 2.0)], [Option(0, 0), Option(4, 0.4)]]
    assert best_table(options, 4.0) == (0, 1)
    assert best_table(options, 8.0) == (1, 1)


def test_what_costs_more_than_it_hides_waits() -> None:
    assert best_table([[Option(0, 0), Option(2, 2.5)]], 4.0) == (0,)


def test_a_long_table_takes_no_time() -> None:
    """32 parts and 12 ways have 13 to the 32nd tables."""
    options = [
        [Option(0, 0), *(Option((1 + r % 7) * (m + 1) / 9, (m + 1) ** 2 * (40 - r) / 2000) for m in range(12))]
        for r in range(32)
    ]
    for prefix_s in (3.0, 17.3, 60.0):
        table = best_table(options, prefix_s)
        assert objective(options, prefix_s, table) >= -Relaxation.of(options).gain(prefix_s) - 1e-9
        uniform = min(objective(options, prefix_s, (m,) * 32) for m in range(13))
        assert objective(options, prefix_s, table) <= uniform
