"""Degrees that the job left to the compiler: the plan's are the job's, and better than the choices it lists.

    roles.actor.train.tensor_parallel=8    step 163 s              the job of the plan says 8
    roles.actor.train.tensor_parallel=4    step 171 s              a runner-up: other values of the same keys
Steps and peaks of the others are of plans that are not here; what is checked is that they explain the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from rollplex.ir.check.facts import Facts
from rollplex.ir.check.rules import Violation
from rollplex.ir.errors import RollplexError
from rollplex.ir.job import Job
from rollplex.ir.job_file import change_job
from rollplex.ir.plan import Candidate


def chosen(facts: Facts) -> Iterator[Violation]:
    """What was chosen is what the job of the plan says."""
    told = facts.plan.summary.degrees
    for key, value in told.items():
        if (asked := _value(facts.plan.job, key)) != value:
            yield Violation("degrees", f"{key}={value} was chosen, the job has {asked}", where="summary.degrees")
    if facts.plan.summary.runners_up and not told:
        yield Violation("degrees", "there are runners-up, and nothing was chosen", where="summary.degrees")


def _value(job: dict[str, Any], key: str) -> Any:
    section: Any = job
    for part in key.split("."):
        section = section.get(part) if isinstance(section, dict) else None
    return section


def candidates(facts: Facts, job: Job) -> Iterator[Violation]:
    """Every other choice is legal, has all keys, and is listed once."""
    told = facts.plan.summary.degrees
    seen = [told]
    for i, c in enumerate(facts.plan.summary.runners_up):
        where = f"summary.runners_up.{i}"
        if set(c.degrees) != set(told):
            what = f"it chooses {', '.join(c.degrees) or 'nothing'}, the plan {', '.join(told) or 'nothing'}"
            yield Violation("degrees", what, where=where)
        elif c.degrees in seen:
            yield Violation("degrees", "these degrees are listed already", where=where)
        else:
            yield from _legal(c, job, where)
        seen.append(c.degrees)


def _legal(c: Candidate, job: Job, where: str) -> Iterator[Violation]:
    try:
        change_job(job, [f"{key}={value}" for key, value in c.degrees.items()])
    except RollplexError as error:
        yield Violation("degrees", f"the job refuses it: {error.problems[0].what}", where=where)


def figures(facts: Facts) -> Iterator[Violation]:
    """A choice that fits has a step and no reason why not; one that does not fit has a reason."""
    capacity = facts.plan.summary.capacity_bytes
    for i, c in enumerate(facts.plan.summary.runners_up):
        wrong = [
            (c.feasible and not c.compiled, "it fits, and was not compiled"),
            (c.compiled != (c.step_s is not None), "what is compiled has a step, and nothing else has"),
            (c.feasible == bool(c.why_not), f"feasible is {c.feasible}, and why_not {c.why_not or 'empty'}"),
            (c.feasible and c.peak_bytes > capacity, f"it fits with {c.peak_bytes:,} bytes on a GPU"),
            (c.step_s is not None and c.step_s <= 0, f"its step takes {c.step_s} s"),
        ]
        for what in (says for bad, says in wrong if bad):
            yield Violation("degrees", what, where=f"summary.runners_up.{i}")


def order(facts: Facts) -> Iterator[Violation]:
    """The plan's choice is the best: those that fit follow by predicted step, then those that do not."""
    plan = facts.plan
    fits = [(plan.feasible, plan.summary.times.step_s), *((c.feasible, c.step_s) for c in plan.summary.runners_up)]
    for i, ((before, first), (after, second)) in enumerate(pairwise(fits)):
        late = after and (not before or (first or 0.0) > (second or 0.0))
        if late:
            what = f"it fits, with a step of {second} s, and stands behind one of {first} s"
            yield Violation("degrees", what, where=f"summary.runners_up.{i}")


def check_degrees(facts: Facts, job: Job) -> Iterator[Violation]:
    """Everything that is wrong with chosen degrees."""
    yield from chosen(facts)
    yield from candidates(facts, job)
    yield from figures(facts)
    yield from order(facts)
