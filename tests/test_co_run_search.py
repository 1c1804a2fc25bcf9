"""The search for a table of sharing agrees with enumeration, written down once more from what happens in time.

part 1 |== decode, prefixes on 80 SMs ==|      prefix work is done at its rate while there is any; decode goes on at
part 2 |== decode, prefixes wait =======|      its own pace in what is left of the part
"""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.passes.co_run_search import Option, Options, Relaxation, best_table, objective

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


def options_of(parts: Parts) -> Options:
    return tuple(tuple(Option(a * s * v, a * (s - 1)) for s, v in ways) for a, ways in parts)


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
    found, gap = best_table(options, prefix_s)
    assert gap == 0
    tables = product(range(len(parts[0][1])), repeat=len(parts))
    least = min(seconds_of(parts, prefix_s, table) for table in tables)
    assert seconds_of(parts, prefix_s, found) == pytest.approx(least, rel=1e-9, abs=1e-8)
    alone = sum(a for a, _ in parts) + prefix_s
    assert alone + objective(options, prefix_s, found) == pytest.approx(least, rel=1e-9, abs=1e-8)


@settings(max_examples=300, deadline=None)
@given(PARTS, st.floats(0.0, 40.0), st.integers(1, 3))
def test_a_search_cut_short_says_how_far_it_may_be(parts: Parts, prefix_s: float, most: int) -> None:
    """No table is better by more than the gap; none that differs in one part is better; none is left: an optimum."""
    options = options_of(parts)
    found, gap = best_table(options, prefix_s, most)
    takes = seconds_of(parts, prefix_s, found)
    tables = list(product(range(len(parts[0][1])), repeat=len(parts)))
    least = min(seconds_of(parts, prefix_s, table) for table in tables)
    assert takes - gap - 1e-8 <= least <= takes + 1e-8
    for table in tables:
        if sum(a != b for a, b in zip(table, found, strict=True)) == 1:
            assert seconds_of(parts, prefix_s, table) >= takes - 1e-8


MEASURED: Parts = [
    (0.2, [(1.0, 0.0), *ways])
    for ways in (
        [(1.66, 0.45), (1.79, 0.51), (2.04, 0.57), (3.47, 0.78)],
        [(1.61, 0.46), (1.75, 0.53), (2.01, 0.59), (3.61, 0.80)],
        [(1.55, 0.47), (1.69, 0.55), (1.96, 0.62), (3.79, 0.83)],
        [(1.44, 0.50), (1.59, 0.59), (1.87, 0.66), (4.11, 0.88)],
        [(1.37, 0.50), (1.49, 0.60), (1.74, 0.68), (4.13, 0.90)],
        [(1.29, 0.51), (1.39, 0.62), (1.60, 0.69), (4.16, 0.91)],
    )
]
"""Parts with 64, 48, .. 4 responses beside prompts of 6,000 tokens on 64, 80, 96, 132 SMs (data/h200_3b.json)."""


def test_two_points_a_part_are_too_few_and_say_so() -> None:
    """The least of 5^6 tables is found by 2,000 points a part; by two the table is 8.5 ms worse, and at most 12.7."""
    least = min(seconds_of(MEASURED, 1.5, table) for table in product(range(5), repeat=6))
    exact, coarse = best_table(options_of(MEASURED), 1.5), best_table(options_of(MEASURED), 1.5, 2)
    assert exact.gap == 0
    assert seconds_of(MEASURED, 1.5, exact.table) == pytest.approx(least, abs=1e-8)
    takes = seconds_of(MEASURED, 1.5, coarse.table)
    assert takes - least == pytest.approx(0.00854, abs=1e-5)
    assert coarse.gap == pytest.approx(0.01272, abs=1e-5)


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
    options = ((Option(0, 0), Option(4, 2.0)), (Option(0, 0), Option(4, 0.4)))
    assert best_table(options, 4.0).table == (0, 1)
    assert best_table(options, 8.0).table == (1, 1)


def test_what_costs_more_than_it_hides_waits() -> None:
    assert best_table(((Option(0, 0), Option(2, 2.5)),), 4.0).table == (0,)


def test_a_long_table_takes_no_time() -> None:
    """32 parts and 12 ways have 13 to the 32nd tables."""
    options = tuple(
        (Option(0, 0), *(Option((1 + r % 7) * (m + 1) / 9, (m + 1) ** 2 * (40 - r) / 2000) for m in range(12)))
        for r in range(32)
    )
    for prefix_s in (3.0, 17.3, 60.0):
        table = best_table(options, prefix_s).table
        assert objective(options, prefix_s, table) >= -Relaxation.of(options).gain(prefix_s) - 1e-9
        uniform = min(objective(options, prefix_s, (m,) * 32) for m in range(13))
        assert objective(options, prefix_s, table) <= uniform
