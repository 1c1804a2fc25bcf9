"""The one place that talks to CP-SAT: one worker, a fixed seed, a deterministic limit, objectives in order.

A solution carries value, bound, status and seconds for each objective. Infeasible (None) and out of time
(SolverTimeout) are different outcomes. With one worker the same model gives the same solution, so plans repeat.

A model is a table of constraint families, numbered as in the maths on top of its file: `FAMILIES` of residency.py,
chunk_sizes.py, layout.py. tests/test_families.py takes away one after the other and sees a test fail each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ortools.sat.python import cp_model

from rollplex.ir.errors import SolverTimeout
from rollplex.ir.plan import SolverResult
from rollplex.ir.stopwatch import solving

Model = TypeVar("Model")


@dataclass(frozen=True)
class Family(Generic[Model]):
    """One numbered constraint family: what it says, and the function that adds all of it to a model."""

    number: int
    says: str
    add: Callable[[Model], None]

    def __str__(self) -> str:
        return f"({self.number}) {self.says}"


def constrain(model: Model, families: Iterable[Family[Model]]) -> Model:
    """The model with these families in it."""
    for family in families:
        family.add(model)
    return model


@dataclass(frozen=True)
class Objective:
    """One thing to minimise, never below 0; `scale` turns the integer value into the unit that is reported."""

    name: str
    expr: cp_model.LinearExprT
    scale: float = 1.0


@dataclass(frozen=True)
class Solution:
    """The last solve's values, one result an objective, and the seconds all of them took."""

    solver: cp_model.CpSolver
    results: tuple[SolverResult, ...]
    seconds: float

    def value(self, expr: cp_model.LinearExprT) -> int:
        """The integer value of a variable or expression."""
        return int(self.solver.value(expr))

    def true(self, literal: cp_model.IntVar) -> bool:
        """Whether a Boolean variable is set."""
        return bool(self.solver.value(literal))


def new_solver(seconds: float, seed: int) -> cp_model.CpSolver:
    """A reproducible solver: the limit is deterministic time, about a second each on a plain core."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = seconds
    return solver


def minimise(
    model: cp_model.CpModel, name: str, objectives: Sequence[Objective], *, seconds: float, seed: int
) -> Solution | None:
    """Minimise the objectives in order, each held at its best before the next; None if nothing satisfies the model.

    A bound holds under the values of the objectives before it. Each solve starts from the solution before it, which
    also stands where the limit ends a later solve early; SolverTimeout if the first one finds nothing.
    """
    found: cp_model.CpSolver | None = None
    results: list[SolverResult] = []
    total = 0.0
    for objective in objectives:
        if found is not None and found.value(objective.expr) == 0:
            results.append(_result(name, objective, 0, 0.0))
        else:
            solver, status = _solve(model, objective, seconds, seed)
            total += solver.wall_time
            solving(solver.wall_time)
            if status == cp_model.INFEASIBLE and found is None:
                return None
            if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                found = solver
                _start_from(model, solver)
            elif found is None:
                raise _timeout(name, objective.name, seconds)
            results.append(
                _result(name, objective, int(found.value(objective.expr)), max(0.0, solver.best_objective_bound))
            )
        model.add(objective.expr <= int(found.value(objective.expr)))
    assert found is not None, f"{name} has no objective"
    return Solution(found, tuple(results), total)


def satisfiable(model: cp_model.CpModel, name: str, *, seconds: float, seed: int) -> bool:
    """Whether anything satisfies the model; SolverTimeout where the limit ends the search."""
    solver = new_solver(seconds, seed)
    status = solver.solve(model)
    solving(solver.wall_time)
    if status == cp_model.UNKNOWN:
        raise _timeout(name, "any placement", seconds)
    return status != cp_model.INFEASIBLE


def _solve(
    model: cp_model.CpModel, objective: Objective, seconds: float, seed: int
) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
    model.minimize(objective.expr)
    solver = new_solver(seconds, seed)
    return solver, solver.solve(model)


def _start_from(model: cp_model.CpModel, solver: cp_model.CpSolver) -> None:
    """Hint the next solve with this one's values."""
    model.clear_hints()
    hint = model.proto.solution_hint
    values = list(solver.response_proto.solution)
    hint.vars.extend(range(len(values)))
    hint.values.extend(values)


def _timeout(name: str, wanted: str, seconds: float) -> SolverTimeout:
    return SolverTimeout(
        f"no solution for `{wanted}` within {seconds:g} s of deterministic time",
        where=name,
        hint="raise solver.seconds in the job",
    )


def _result(name: str, objective: Objective, value: int, bound: float) -> SolverResult:
    """Bounds of whole numbers are whole: 3.2 proves 4."""
    least = min(value, math.ceil(bound - 1e-6))
    return SolverResult(
        name=name,
        status="optimal" if least == value else "feasible",
        objective=objective.name,
        value=value * objective.scale,
        bound=least * objective.scale,
    )
