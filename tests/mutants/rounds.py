"""Faults of rounds of sampling: one that judges another's responses, or does not ask what the one before has found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mutants.agree import with_job
from mutants.edit import change, move, mutant, put, steps, summarise, without
from rollplex.ir.parts import of_round, round_of, whole
from rollplex.ir.plan import Plan
from rollplex.ir.planned_rounds import Rounds
from rollplex.ir.steps import Run, Signal, Wait


def _rounds(plan: Plan, **fields: Any) -> Plan:
    assert plan.summary.rounds is not None
    return summarise(plan, rounds=plan.summary.rounds.model_copy(update=fields))


def _tasks(plan: Plan) -> Iterator[tuple[str, int, Run]]:
    """Tasks that take or make a value of a round before the last."""
    for process, i, step in steps(plan, Run):
        if any(round_of(n) is not None for n in (*step.inputs, *step.outputs)):
            yield process, i, step


@mutant("round")
def rounds_of_another_plan(plan: Plan) -> Iterator[Plan]:
    """A plan for one round says that there are more, or one of several forgets them."""
    if plan.summary.rounds is None:
        yield summarise(plan, rounds=Rounds(most=2, keeps=plan.graph[-1].name))
        return
    yield summarise(plan, rounds=None)
    yield _rounds(plan, most=plan.summary.rounds.most + 1)


@mutant("round", "asked")
def job_of_other_rounds(plan: Plan) -> Iterator[Plan]:
    if plan.summary.rounds is None:
        if plan.summary.tail is None and plan.summary.trajectories is None:
            yield with_job(plan, "workload", "dynamic_sampling", value={"rounds": 3})
        return
    yield with_job(plan, "workload", "dynamic_sampling", value=None)
    yield with_job(plan, "workload", "dynamic_sampling", "rounds", value=plan.summary.rounds.most + 1)


@mutant("round")
def kept_by_something_else(plan: Plan) -> Iterator[Plan]:
    """What says that a group is kept is not what the loss leaves out."""
    if (told := plan.summary.rounds) is None:
        return
    for name in ("nothing_of_the_sort", *(r.name for r in plan.graph if r.name != told.keeps)):
        yield _rounds(plan, keeps=name)


@mutant("round", "missing-value")
def judged_by_another_round(plan: Plan) -> Iterator[Plan]:
    """A task takes the responses, scores or prompts of a round that is not its own."""
    for process, i, step in _tasks(plan):
        for name in step.inputs:
            own = round_of(name)
            for other in (whole(name), of_round(whole(name), 0 if own else 1)):
                if other not in step.inputs:
                    swapped = tuple(other if n == name else n for n in step.inputs)
                    yield put(plan, process, i, change(step, inputs=swapped))


@mutant("round", "missing-input")
def next_round_without_what_was_found(plan: Plan) -> Iterator[Plan]:
    for process, i, step in _tasks(plan):
        for name in step.inputs:
            yield put(plan, process, i, change(step, inputs=without(step.inputs, name)))


@mutant("round")
def trained_on_a_round_before_the_last(plan: Plan) -> Iterator[Plan]:
    """The trainer takes prompts, responses or scores that are not yet those of the step."""
    if plan.summary.rounds is None:
        return
    for process, i, step in steps(plan, Run, process="train"):
        for name in step.inputs:
            earlier = tuple(of_round(n, 0) if n == name else n for n in step.inputs)
            yield put(plan, process, i, change(step, inputs=earlier))


@mutant("missing-value", "deadlock")
def trainer_waits_for_prompts_of_an_early_round(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Wait) if plan.summary.rounds else ():
        if process == "train" and round_of(step.event) is None and any(step.event == n for n in _judged(plan)):
            yield put(plan, process, i, change(step, event=of_round(step.event, 0)))


def _judged(plan: Plan) -> set[str]:
    return {whole(n) for _, _, step in _tasks(plan) for n in (*step.inputs, *step.outputs) if round_of(n) is not None}


@mutant("once", "round", "missing-value")
def round_left_out_or_run_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in _tasks(plan):
        yield put(plan, process, i)
        yield put(plan, process, i, step, step)


@mutant("slot", "once", "round")
def round_of_another_number(plan: Plan) -> Iterator[Plan]:
    for process, i, step in _tasks(plan):
        yield put(plan, process, i, change(step, microbatch=step.microbatch + 1))
        yield put(plan, process, i, change(step, microbatch=100))


@mutant("missing-value", "deadlock")
def next_round_before_the_last_is_judged(plan: Plan) -> Iterator[Plan]:
    for process, i, step in _tasks(plan):
        if step.task == "load" and step.inputs:
            yield move(plan, process, i, i - 1)


@mutant("missing-value", "deadlock")
def round_sent_before_it_is_sampled(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Signal):
        if round_of(step.event) is not None:
            yield move(plan, process, i, i - 1)
