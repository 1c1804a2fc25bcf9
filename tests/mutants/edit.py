"""Editing plans: replace, move and insert steps, change fields; and the table of mutants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rollplex.ir.plan import Plan, PlannedObject
from rollplex.ir.steps import Run, Step, UpdateChunk

Make = Callable[[Plan], Iterator[Plan]]


@dataclass(frozen=True)
class Mutant:
    """A kind of fault: how it is made, and the violations one of which must name it."""

    name: str
    kinds: frozenset[str]
    make: Make


MUTANTS: dict[str, Mutant] = {}


def mutant(*kinds: str) -> Callable[[Make], Make]:
    """Register a kind of fault under the function's name."""

    def register(make: Make) -> Make:
        name = make.__name__
        assert name not in MUTANTS, f"two mutants are named {name}"
        MUTANTS[name] = Mutant(name, frozenset(kinds), make)
        return make

    return register


# ---- steps


def steps(plan: Plan, *kinds: type, process: str = "") -> Iterator[tuple[str, int, Any]]:
    """Steps of these classes (all, if none is given), with their program and place."""
    for name in (process,) if process else plan.programs:
        for i, step in enumerate(plan.programs[name]):
            if not kinds or isinstance(step, kinds):
                yield name, i, step


def put(plan: Plan, process: str, i: int, *new: Step) -> Plan:
    """The plan with a step replaced by others, or left out."""
    old = plan.programs[process]
    return plan.model_copy(update={"programs": {**plan.programs, process: (*old[:i], *new, *old[i + 1 :])}})


def insert(plan: Plan, process: str, i: int, *new: Step) -> Plan:
    """The plan with steps inserted before a place."""
    old = plan.programs[process]
    return plan.model_copy(update={"programs": {**plan.programs, process: (*old[:i], *new, *old[i:])}})


def move(plan: Plan, process: str, i: int, to: int) -> Plan:
    """The plan with a step moved to another place of its program."""
    program = list(plan.programs[process])
    program.insert(to, program.pop(i))
    return plan.model_copy(update={"programs": {**plan.programs, process: tuple(program)}})


def change(step: Step, **fields: Any) -> Any:
    """A step with other fields."""
    return step.model_copy(update=fields)


def without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """A list of names less one."""
    return tuple(n for n in names if n != name)


def unlist(step: Any, name: str) -> Any:
    """A run or chunk that no longer names an object."""
    return change(step, **{field: without(getattr(step, field), name) for field in ("reads", "writes", "streams")})


def used(step: Step) -> tuple[str, ...]:
    """Objects that a step uses in HBM, as a mutant maker needs it: lists of runs, chunks and the rest."""
    match step:
        case Run() | UpdateChunk():
            return (*step.reads, *step.writes)
        case _ if step.kind in ("exchange", "publish", "rebuild"):
            return (*getattr(step, "reads", ()), step.object)  # type: ignore[union-attr]
        case _:
            return ()


def uses(plan: Plan, process: str, name: str, start: int = 0) -> list[int]:
    """Places from `start` on where a program uses an object in HBM."""
    return [i for _, i, s in steps(plan, process=process) if i >= start and name in used(s)]


def place(plan: Plan, process: str, barrier: str) -> int:
    """Where a program meets a barrier."""
    return next(i for _, i, s in steps(plan, process=process) if s.kind == "barrier" and s.name == barrier)


# ---- objects and the summary


def objects(plan: Plan) -> dict[str, PlannedObject]:
    """Objects by name."""
    return {o.name: o for o in plan.summary.objects}


def summarise(plan: Plan, **fields: Any) -> Plan:
    """The plan with other fields in its summary."""
    return plan.model_copy(update={"summary": plan.summary.model_copy(update=fields)})


def with_object(plan: Plan, name: str, **fields: Any) -> Plan:
    """The plan with other fields in one object."""
    changed = (o.model_copy(update=fields) if o.name == name else o for o in plan.summary.objects)
    return summarise(plan, objects=tuple(changed))


def with_window(plan: Plan, name: str, **fields: Any) -> Plan:
    """The plan with other fields in one window."""
    changed = (w.model_copy(update=fields) if w.name == name else w for w in plan.summary.windows)
    return summarise(plan, windows=tuple(changed))


def with_layout(plan: Plan, **fields: Any) -> Plan:
    """The plan with another layout."""
    return summarise(plan, layout=plan.summary.layout.model_copy(update=fields))
