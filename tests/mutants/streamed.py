"""Faults of groups that are trained on while others decode: too early, in another order, on others' responses."""

from __future__ import annotations

from collections.abc import Iterator

from mutants.edit import change, move, mutant, put, steps, summarise
from rollplex.ir.parts import group_of, part, whole
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run, Signal, Wait


def waits(plan: Plan, process: str) -> dict[str, int]:
    """Where a program waits for a part of a value."""
    return {s.event: i for p, i, s in steps(plan, Wait, process=process) if group_of(s.event) is not None}


@mutant("missing-value")
def group_before_its_responses(plan: Plan) -> Iterator[Plan]:
    """A group is scored or trained on before its last response has ended."""
    for process in plan.programs:
        at = waits(plan, process)
        for _, i, step in steps(plan, Run, process=process):
            for name in step.inputs:
                if name in at and step.task != "grad_norm":
                    yield move(plan, process, i, at[name])


@mutant("missing-value")
def group_sent_before_it_is_complete(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Signal):
        if group_of(step.event) is not None:
            yield move(plan, process, i, i - 1)


@mutant("group-order", "missing-value")
def group_with_responses_of_another(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Run):
        for name in step.inputs:
            if (group := group_of(name)) is not None and step.task != "grad_norm":
                other = part(whole(name), group - 1 if group else 1)
                yield put(plan, process, i, change(step, inputs=tuple(other if n == name else n for n in step.inputs)))


@mutant("group-order", "task-order")
def gradients_in_another_order(plan: Plan) -> Iterator[Plan]:
    """Group 1 is trained on before group 0: the same gradient, and other bits."""
    if plan.schedule != "streamed":
        return
    for task in ("train", "prefix_backward"):
        found = [(p, i, s) for p, i, s in steps(plan, Run) if s.task == task]
        (process, first, one), (_, second, two) = found[0], next(f for f in found[1:] if f[2].node == found[0][2].node)
        swapped = put(put(plan, process, first, change(one, microbatch=two.microbatch)), process, second,
                      change(two, microbatch=one.microbatch))  # fmt: skip
        yield swapped


@mutant("group-order")
def divisor_of_some_groups(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Run):
        if step.task == "grad_norm" and any(group_of(n) is not None for n in step.inputs):
            yield put(plan, process, i, change(step, inputs=step.inputs[1:]))


@mutant("once")
def group_sampled_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Run):
        if step.task == "generate" and group_of(step.outputs[0]) is not None:
            yield put(plan, process, i, step, step)
            yield put(plan, process, i, change(step, outputs=(step.node,)))


@mutant("times")
def hidden_work_that_is_not_there(plan: Plan) -> Iterator[Plan]:
    t = plan.summary.times
    yield summarise(plan, times=t.model_copy(update={"hidden_post_s": t.hidden_post_s + t.post_s + 1.0}))
    if plan.schedule != "rollplex":
        yield summarise(plan, times=t.model_copy(update={"streamed_s": t.step_s}))
