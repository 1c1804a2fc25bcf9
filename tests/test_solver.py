"""Large instances tell value and bound, a limit is a limit, and out of time is not infeasible."""

from __future__ import annotations

import random

import pytest
from ortools.sat.python import cp_model

from rollplex.ir.errors import SolverTimeout
from rollplex.ir.plan import Residency, SolverResult
from rollplex.passes.residency import FAMILIES, Model
from rollplex.passes.residency_data import Data, Item, Stretch
from rollplex.passes.solver import Objective, constrain, minimise


def large(seed: int, objects: int = 200, windows: int = 24) -> Data:
    """Hundreds of permanent objects, each needed in some of dozens of windows, in too little HBM for all of them."""
    rng = random.Random(seed)
    names = tuple(f"w{i}" for i in range(windows))
    free, needed = frozenset[Residency]({"hbm", "host"}), frozenset[Residency]({"hbm"})

    def item(i: int) -> Item:
        places = {w: needed if rng.random() < 0.15 else free for w in names}
        return Item(f"o{i}", rng.randint(100, 4000), places, cyclic=True, link_us=rng.randint(100, 9000))

    items = tuple(item(i) for i in range(objects))
    half = sum(o.units for o in items) // 4
    stretches = tuple(Stretch((w,), rng.randint(0, 20_000)) for w in names)
    return Data(names, items, half, 10 * half, stretches, dict.fromkeys(names, 0))


def solved(data: Data, seconds: float) -> tuple[SolverResult, ...]:
    model = constrain(Model(data), FAMILIES)
    solution = minimise(model.cp, "residency", model.objectives(), seconds=seconds, seed=0)
    assert solution is not None
    return solution.results


def test_a_large_instance_tells_value_and_bound() -> None:
    """200 objects x 24 windows: within the limit not all is proven, and no bound exceeds its value."""
    results = solved(large(0), seconds=0.3)
    assert any(r.status == "feasible" for r in results)
    assert all(0 <= r.bound <= r.value for r in results)
    assert all((r.status == "optimal") == (r.bound == r.value) for r in results)


def test_an_unproven_plan_repeats() -> None:
    """The limit is deterministic time, not the clock of a busy machine."""
    assert solved(large(1, 60), seconds=0.1) == solved(large(1, 60), seconds=0.1)


def knapsack() -> tuple[cp_model.CpModel, list[cp_model.IntVar], cp_model.LinearExprT]:
    """A market split: easy to state, hard to satisfy."""
    rng, model = random.Random(3), cp_model.CpModel()
    x = [model.new_bool_var(f"x{i}") for i in range(60)]
    for _ in range(6):
        weights = [rng.randint(1, 999) for _ in x]
        model.add(sum(w * v for w, v in zip(weights, x, strict=True)) == sum(weights) // 2)
    return model, x, sum(x)


def test_out_of_time_is_an_error_with_a_remedy() -> None:
    """No solution within the limit: neither a plan nor a claim that there is none."""
    model, _, count = knapsack()
    with pytest.raises(SolverTimeout) as error:
        minimise(model, "split", [Objective("items", count)], seconds=0.01, seed=0)
    assert str(error.value) == (
        "split: no solution for `items` within 0.01 s of deterministic time\n    try: raise solver.seconds in the job"
    )


def test_infeasible_is_not_out_of_time() -> None:
    """x >= 1 and x <= 0."""
    model = cp_model.CpModel()
    x = model.new_int_var(0, 5, "x")
    model.add(x >= 1)
    model.add(x <= 0)
    assert minimise(model, "none", [Objective("x", x)], seconds=1, seed=0) is None


def test_a_bound_holds_under_the_objectives_before() -> None:
    """x + y = 4: least x first, so y is 4 and proven so."""
    model = cp_model.CpModel()
    x, y = (model.new_int_var(0, 9, n) for n in "xy")
    model.add(x + y == 4)
    found = minimise(model, "two", [Objective("x", x), Objective("y", y)], seconds=1, seed=0)
    assert found is not None
    assert [(r.value, r.bound, r.status) for r in found.results] == [(0, 0, "optimal"), (4, 4, "optimal")]
