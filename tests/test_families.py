"""Every solver agrees with enumeration, and with any one constraint family taken away it no longer does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ORACLES, Catch, Oracle, catches
from oracles.base import UNCHECKED


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda o: o.solver)
def test_a_solver_is_what_its_maths_says(oracle: Oracle) -> None:
    """Optimum, worth of the solution, and one more assignment, legal or not, on random small instances."""

    @settings(max_examples=120, deadline=None, suppress_health_check=UNCHECKED)
    @given(st.data())
    def agrees(data: st.DataObject) -> None:
        instance = data.draw(oracle.instances)
        assert oracle.wrong(instance) == ""

    agrees()


@pytest.mark.parametrize(
    "search", [pytest.param(search, id=f"{o.solver}: {change}") for o in ORACLES for change, search in catches(o)]
)
def test_no_family_and_no_objective_is_redundant(search: Callable[[], Catch]) -> None:
    """One family removed, or two objectives swapped: some instance notices."""
    caught = search()
    assert caught.how, f"{caught.solver} {caught.change}: nothing notices"
