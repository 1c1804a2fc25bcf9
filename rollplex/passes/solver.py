"""The one place that talks to CP-SAT: one worker, a fixed seed, a deterministic limit, objectives in order.

A solution carries value, bound, status and seconds for each objective. Infeasible (None) and out of time
(SolverTimeout) are different outcomes. With one worker the same model gives the same solution, so plans repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from rollplex.ir.errors import SolverTimeout
from rollplex.ir.plan import SolverResult


@dataclass(frozen=True)
class Objective:
    """One thing to minimise; `scale` turns the integer value into the unit that is reported."""

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
    """Minimise the objectives in order, each held at its best before the next; None if nothing satisfies the model."""
    results: list[SolverResult] = []
    total = 0.0
    solver = new_solver(seconds, seed)
    for objective in objectives:
        model.minimize(objective.expr)
        solver = new_solver(seconds, seed)
        status = solver.solve(model)
        total += solver.wall_time
        if status == cp_model.INFEASIBLE:
            return None
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            raise SolverTimeout(
                f"{name}: no solution for `{objective.name}` within {seconds:g} s of deterministic time",
                hint="raise solver.seconds in the job",
            )
        best = round(solver.objective_value)
        results.append(_result(name, objective, status, best, solver.best_objective_bound))
        model.add(objective.expr <= best)
    return Solution(solver, tuple(results), total)


def _result(name: str, objective: Objective, status: object, best: int, bound: float) -> SolverResult:
    return SolverResult(
        name=name,
        status="optimal" if status == cp_model.OPTIMAL else "feasible",
        objective=objective.name,
        value=best * objective.scale,
        bound=round(bound) * objective.scale,
    )
