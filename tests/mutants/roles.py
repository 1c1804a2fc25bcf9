"""Faults of plans with several trained roles: one is not updated, trained too early, or hides what it takes."""

from __future__ import annotations

from collections.abc import Iterator

from mutants.edit import change, move, mutant, put, steps, without
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Publish, Run, UpdateChunk


def trained(plan: Plan) -> list[str]:
    """Roles with a train task, if there are several."""
    roles = dict.fromkeys(s.role for _, _, s in steps(plan, Run) if s.task == "train")
    return list(roles) if len(roles) > 1 else []


def without_steps(plan: Plan, *kinds: type, role: str) -> Plan:
    """The plan without a role's steps of these classes."""

    def of_role(step: object) -> bool:
        name = getattr(step, "role", "") or getattr(step, "object", "").partition(".")[0]
        return isinstance(step, kinds) and name == role

    programs = {p: tuple(s for s in program if not of_role(s)) for p, program in plan.programs.items()}
    return plan.model_copy(update={"programs": programs})


@mutant("chunk-cover")
def one_role_not_updated(plan: Plan) -> Iterator[Plan]:
    """All chunks and the publication of one of several trained roles are left out."""
    for role in trained(plan):
        yield without_steps(plan, UpdateChunk, Publish, role=role)


@mutant("publish")
def one_role_not_published(plan: Plan) -> Iterator[Plan]:
    for role in trained(plan):
        yield without_steps(plan, Publish, role=role)


@mutant("missing-value")
def loss_before_the_values_it_takes(plan: Plan) -> Iterator[Plan]:
    """The actor's group m is trained before the critic's, whose values are in its advantage."""
    makers = {(n, s.microbatch): i for _, i, s in steps(plan, Run) if s.task == "train" for n in s.outputs}
    for process, i, step in steps(plan, Run):
        for name in step.inputs if step.task == "train" else ():
            if (name, step.microbatch) in makers:
                early = makers[name, step.microbatch]
                window = plan.programs[process][early].window
                yield move(put(plan, process, i, change(step, window=window)), process, i, early)


@mutant("missing-input")
def values_of_another_role_hidden(plan: Plan) -> Iterator[Plan]:
    made = {n for _, _, s in steps(plan, Run) if s.task == "train" for n in s.outputs}
    for process, i, step in steps(plan, Run):
        for name in sorted(made.intersection(step.inputs)):
            yield put(plan, process, i, change(step, inputs=without(step.inputs, name)))


@mutant("missing-value")
def values_of_a_group_not_given(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Run):
        if step.task == "train" and step.outputs:
            yield put(plan, process, i, change(step, outputs=()))


@mutant("gradient-final")
def norm_of_one_role_missing(plan: Plan) -> Iterator[Plan]:
    for role in trained(plan):
        for process, i, step in steps(plan, Run):
            if step.task == "grad_norm" and step.role == role:
                yield put(plan, process, i)


@mutant("chunk-size")
def chunks_of_another_role(plan: Plan) -> Iterator[Plan]:
    """The summary gives each role the chunks of the other."""
    chunks = plan.summary.chunks
    for role, own in chunks.others.items():
        if (own.count, own.elements) != (chunks.optimizer.count, chunks.optimizer.elements):
            swapped = chunks.model_copy(update={"optimizer": own, "others": {role: chunks.optimizer}})
            yield plan.model_copy(update={"summary": plan.summary.model_copy(update={"chunks": swapped})})


@mutant("loss")
def loss_of_a_role_missing(plan: Plan) -> Iterator[Plan]:
    for role in plan.losses:
        yield plan.model_copy(update={"losses": {r: loss for r, loss in plan.losses.items() if r != role}})


@mutant("loss")
def loss_of_another_role(plan: Plan) -> Iterator[Plan]:
    for role, loss in plan.losses.items():
        wrong = loss.model_copy(update={"role": f"{role}'"})
        yield plan.model_copy(update={"losses": {**plan.losses, role: wrong}})


@mutant("layout")
def copies_that_the_ranks_do_not_hold(plan: Plan) -> Iterator[Plan]:
    for name, kind in plan.processes.items():
        for role in kind.role_data_parallel:
            wrong = kind.model_copy(update={"role_data_parallel": {**kind.role_data_parallel, role: kind.ranks + 1}})
            yield plan.model_copy(update={"processes": {**plan.processes, name: wrong}})
