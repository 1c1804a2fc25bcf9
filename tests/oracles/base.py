"""What an oracle is, and the search for an instance that notices a change of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy
from ortools.sat.python import cp_model

from rollplex.passes.solver import Family, Objective, Solution, minimise

Instance = TypeVar("Instance")
Order = Callable[[list[Objective]], list[Objective]]
EXAMPLES = 300


@dataclass(frozen=True)
class Oracle(Generic[Instance]):
    """One solver: its families, small instances of it, and what a model of some families gets wrong on one of them.

    `witnesses` are instances that a search would seldom draw: where two objectives pull in different directions.
    """

    solver: str
    families: tuple[Family[Any], ...]
    objectives: tuple[str, ...]
    instances: SearchStrategy[Instance]
    disagreement: Callable[[Instance, Sequence[Family[Any]], Order], str]
    witnesses: tuple[Instance, ...] = ()

    def wrong(self, instance: Instance, without: int | None = None, order: Order = list) -> str:
        """Where the model, one family taken away perhaps, is not the maths; empty where it is."""
        return self.disagreement(instance, [f for f in self.families if f.number != without], order)


@dataclass(frozen=True)
class Catch:
    """A change of a model and how the oracle noticed it; `how` is empty when it did not."""

    solver: str
    change: str
    how: str


def catches(oracle: Oracle[Any]) -> Iterator[tuple[str, Callable[[], Catch]]]:
    """Every change that must be noticed: each family removed, each two neighbouring objectives swapped."""
    for family in oracle.families:
        yield f"without {family}", lambda f=family: _search(oracle, f"without {f}", f.number, list)
    for i, (a, b) in enumerate(zip(oracle.objectives, oracle.objectives[1:], strict=False)):
        change = f"{b} before {a}"
        yield change, lambda i=i, change=change: _search(oracle, change, None, _swapped(i))


UNCHECKED: tuple[HealthCheck, ...] = tuple(HealthCheck)  # pyright: ignore[reportAssignmentType]  (its metaclass iterates)


def _swapped(i: int) -> Order:
    return lambda found: [*found[:i], found[i + 1], found[i], *found[i + 2 :]]


def _search(oracle: Oracle[Any], change: str, without: int | None, order: Order) -> Catch:
    for one in oracle.witnesses:
        if how := oracle.wrong(one, without, order):
            return Catch(oracle.solver, change, how)
    limits = settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=UNCHECKED,
    )
    try:
        caught = find(oracle.instances, lambda one: oracle.wrong(one, without, order) != "", settings=limits)
    except NoSuchExample:
        return Catch(oracle.solver, change, "")
    return Catch(oracle.solver, change, oracle.wrong(caught, without, order))


def solve(cp: cp_model.CpModel, objectives: list[Objective]) -> tuple[Solution | None, dict[str, int]]:
    """The solution and every objective's value in whole units; proven, as small instances must be."""
    solution = minimise(cp, "oracle", objectives, seconds=20, seed=0)
    if solution is None:
        return None, {}
    assert all(r.status == "optimal" and r.bound == r.value for r in solution.results)
    scales = {o.name: o.scale for o in objectives}
    return solution, {r.objective: round(r.value / scales[r.objective]) for r in solution.results}
