"""Faults of tail cutting: which prompt groups a step takes, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mutants.agree import with_job
from mutants.edit import change, mutant, put, steps, summarise, with_object
from rollplex.ir.plan import Plan, Tail
from rollplex.ir.steps import Run


def _tail(plan: Plan, **fields: Any) -> Plan:
    assert plan.summary.tail is not None
    return summarise(plan, tail=plan.summary.tail.model_copy(update=fields))


@mutant("tail")
def tail_of_another_plan(plan: Plan) -> Iterator[Plan]:
    """A plan for every group says that a step takes some."""
    if plan.summary.tail is None:
        groups = max(o.slots for o in plan.summary.objects) * plan.processes["train"].data_parallel
        fields = {"sampled": 2 * groups, "taken": groups + 1, "ends_at_tokens": 1.0, "snapshots": 1}
        yield summarise(plan, tail=Tail(kind="oversample", **fields))


@mutant("tail", "microbatch")
def tail_forgotten(plan: Plan) -> Iterator[Plan]:
    """Groups that a step leaves are then missing from its work."""
    if plan.summary.tail is not None and plan.programs["train"][0].window.startswith("P1 prefix"):
        yield summarise(plan, tail=None)


@mutant("tail")
def as_many_taken_as_sampled(plan: Plan) -> Iterator[Plan]:
    if tail := plan.summary.tail:
        yield _tail(plan, taken=tail.sampled)
        yield _tail(plan, sampled=tail.taken)
        yield _tail(plan, taken=0)


@mutant("microbatch")
def work_on_a_group_that_is_not_taken(plan: Plan) -> Iterator[Plan]:
    """A slot of an unfinished group is trained or scored on, or one of a finished group is not."""
    for process, i, step in steps(plan, Run) if plan.summary.tail else ():
        slots = next((o.slots for o in plan.summary.objects if o.name == f"{step.role}.boundary"), 0)
        if step.task in ("suffix", "train", "prefix_backward"):
            yield put(plan, process, i, change(step, microbatch=slots - 1))


@mutant("tail")
def unfinished_left_behind(plan: Plan) -> Iterator[Plan]:
    """`generate` neither takes up nor leaves what partial rollout carries over, or the plan names nothing."""
    if not (tail := plan.summary.tail):
        return
    if not tail.carried:
        yield _tail(plan, kind="partial")
        yield _tail(plan, carried="actor.master")
        return
    yield _tail(plan, carried="")
    yield _tail(plan, kind="oversample")
    yield _tail(plan, carried="nothing.of_the_sort")
    yield with_object(plan, tail.carried, **{"class_": "phase-local"})
    for process, i, step in steps(plan, Run):
        if step.task == "generate":
            yield put(plan, process, i, change(step, streams=()))


@mutant("asked")
def job_of_another_tail(plan: Plan) -> Iterator[Plan]:
    """The job waits for every response and the plan does not, or the other way round."""
    other = {"kind": "full"} if plan.summary.tail else {"kind": "oversample", "factor": 2.0}
    yield with_job(plan, "workload", "rollout", value=other)
