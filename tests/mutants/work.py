"""Faults of work: prompt groups left out, done twice or in the wrong order, tasks that hide what they use."""

from __future__ import annotations

from collections.abc import Iterator

from mutants.agree import with_job
from mutants.edit import change, move, mutant, objects, put, steps, unlist, with_object, without
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run

BY_GROUP = ("prefix", "suffix", "whole", "train", "prefix_backward")


def tasks(plan: Plan, *names: str) -> Iterator[tuple[str, int, Run]]:
    """Runs of these tasks."""
    yield from ((p, i, s) for p, i, s in steps(plan, Run) if s.task in names)


def boundaries(plan: Plan, *names: str) -> set[str]:
    """Those of these objects that are boundaries."""
    return {n for n in names if objects(plan)[n].class_ == "boundary"}


@mutant("microbatch")
def group_left_out(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in tasks(plan, "prefix", "suffix", "whole", "train"):
        yield put(plan, process, i)


@mutant("microbatch")
def prefix_backward_missing(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in tasks(plan, "prefix_backward"):
        yield put(plan, process, i)


@mutant("microbatch")
def group_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in tasks(plan, *BY_GROUP):
        yield put(plan, process, i, step, step)


@mutant("microbatch")
def group_left_out_for_another(plan: Plan) -> Iterator[Plan]:
    for process, i, step in tasks(plan, *BY_GROUP):
        if step.microbatch:
            yield put(plan, process, i, change(step, microbatch=step.microbatch - 1))


@mutant("microbatch")
def task_of_an_unknown_role(plan: Plan) -> Iterator[Plan]:
    for process, i, step in tasks(plan, *BY_GROUP):
        yield put(plan, process, i, change(step, role="nobody"))


@mutant("slot")
def group_beyond_the_slots(plan: Plan) -> Iterator[Plan]:
    groups = {s.role: 1 + max(r.microbatch for _, _, r in tasks(plan, s.task)) for _, _, s in tasks(plan, *BY_GROUP)}
    groups |= {o.role: o.slots for o in plan.summary.objects if o.class_ == "boundary"}
    for process, i, step in tasks(plan, *BY_GROUP):
        if groups[step.role] > 1:
            yield put(plan, process, i, change(step, microbatch=groups[step.role]))


@mutant("slot", "microbatch")
def object_with_other_slots(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        if o.slots > 1:
            yield with_object(plan, o.name, slots=o.slots + 1)
            yield with_object(plan, o.name, slots=o.slots - 1)


@mutant("task-order")
def backward_before_train(plan: Plan) -> Iterator[Plan]:
    for process, i, step in tasks(plan, "prefix_backward"):
        train = [j for _, j, s in tasks(plan, "train") if (s.role, s.microbatch) == (step.role, step.microbatch)]
        yield move(plan, process, i, train[0])


@mutant("task-order")
def suffix_before_prefix(plan: Plan) -> Iterator[Plan]:
    for process, i, step in tasks(plan, "prefix"):
        later = [
            j
            for p, j, s in tasks(plan, "suffix", "train")
            if p == process and s.microbatch == step.microbatch and boundaries(plan, *step.writes) & set(s.reads)
        ]
        yield from (move(plan, process, i, j) for j in later[:1])


def _with_group(plan: Plan) -> set[str]:
    """Roles whose prefixes run with their groups, several of them."""
    return {s.role for _, _, s in tasks(plan, "prefix") if s.microbatch and s.window == f"P2 train-{s.role}"}


@mutant("one-group")
def room_taken_before_its_backward(plan: Plan) -> Iterator[Plan]:
    """The prefix of the next group writes over what the backward of this one needs."""
    for process, i, step in tasks(plan, "prefix"):
        if step.role in _with_group(plan) and step.microbatch:
            yield move(plan, process, i, i - 1)
            yield move(plan, process, i, i - 2)


@mutant("one-group")
def all_prefixes_of_a_role_first(plan: Plan) -> Iterator[Plan]:
    for role in sorted(_with_group(plan)):
        found = [(p, i) for p, i, s in tasks(plan, "prefix") if s.role == role]
        for place, (process, i) in enumerate(found):
            plan = move(plan, process, i, found[0][1] + place)
        yield plan


@mutant("one-group")
def prefix_of_a_group_in_another_window(plan: Plan) -> Iterator[Plan]:
    """The first of a role runs apart, at the end of the window before."""
    for process, i, step in tasks(plan, "prefix"):
        if step.role in _with_group(plan) and not step.microbatch:
            begins = next(j for p, j, s in steps(plan, process=process) if s.window == step.window)
            early = change(step, window=plan.programs[process][begins - 1].window)
            yield move(put(plan, process, i, early), process, i, begins)


@mutant("asked")
def room_for_more_than_one_group(plan: Plan) -> Iterator[Plan]:
    for role in sorted(_with_group(plan)):
        yield with_object(plan, f"{role}.boundary", slots=2)


@mutant("asked", "slot", "one-group")
def job_whose_prefixes_wait(plan: Plan) -> Iterator[Plan]:
    """The job has all prefixes of a role first, or one with its group, and the plan it the other way round."""
    grouped = _with_group(plan)
    for role in dict.fromkeys(s.role for _, _, s in tasks(plan, "train")):
        yield with_job(plan, "roles", role, "prefix_saved", value="hbm" if role in grouped else "group")


@mutant("node")
def node_of_another_kind(plan: Plan) -> Iterator[Plan]:
    """A task executes a node that the graph gives to another kind of task."""
    ops = {r.name: r.op for r in plan.graph}
    for process, i, step in steps(plan, Run):
        for name in sorted(n for n in ops if ops[n] != ops[step.node]):
            yield put(plan, process, i, change(step, node=name))


@mutant("node")
def node_of_another_role(plan: Plan) -> Iterator[Plan]:
    nodes = {(s.task, s.role, s.node) for _, _, s in steps(plan, Run)}
    for process, i, step in tasks(plan, *BY_GROUP):
        for node in sorted(n for t, role, n in nodes if t == step.task and role != step.role):
            yield put(plan, process, i, change(step, node=node))


@mutant("node")
def host_function_not_bound(plan: Plan) -> Iterator[Plan]:
    for name in plan.hosts:
        yield plan.model_copy(update={"hosts": {n: f for n, f in plan.hosts.items() if n != name}})


@mutant("once")
def made_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in tasks(plan, "load", "generate", "host"):
        yield put(plan, process, i, step, step)


@mutant("once")
def not_made(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in tasks(plan, "load", "generate", "host"):
        yield put(plan, process, i)


@mutant("task-objects")
def boundary_not_used(plan: Plan) -> Iterator[Plan]:
    for process, i, step in tasks(plan, *BY_GROUP):
        for name in sorted(boundaries(plan, *step.reads, *step.writes)) if step.task != "prefix_backward" else ():
            yield put(plan, process, i, unlist(step, name))


@mutant("task-objects", "not-produced")
def weights_not_listed(plan: Plan) -> Iterator[Plan]:
    """A task hides that it reads its role's weights."""
    for process, i, step in tasks(plan, "generate", *BY_GROUP):
        own = [n for n in step.reads if objects(plan)[n].class_ == "regenerable"]
        yield put(plan, process, i, change(step, reads=tuple(n for n in step.reads if n not in own)))


@mutant("task-objects")
def object_hidden_in_one_group(plan: Plan) -> Iterator[Plan]:
    """One group of several does not list something the others list; saved state has mutants of its own."""
    saved = {o.name for o in plan.summary.objects if o.attached and o.class_ == "phase-local"}
    for process, i, step in tasks(plan, *BY_GROUP):
        same = [s for _, _, s in tasks(plan, step.task) if s.role == step.role]
        for name in sorted({*step.reads, *step.writes} - saved) if len(same) > 1 else ():
            yield put(plan, process, i, unlist(step, name))


@mutant("task-objects")
def gradients_not_written(plan: Plan) -> Iterator[Plan]:
    norms = {n for _, _, s in tasks(plan, "grad_norm") for n in s.reads}
    for process, i, step in tasks(plan, "train", "prefix_backward"):
        for name in sorted(norms.intersection(step.writes)):
            yield put(plan, process, i, change(step, writes=without(step.writes, name)))


@mutant("saved-state")
def saved_state_dropped_though_not_recomputable(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        if o.attached and o.class_ == "phase-local":
            broken = with_object(plan, o.name, recomputable=False)
            for process, i, step in tasks(plan, "prefix", "prefix_backward"):
                broken = put(broken, process, i, unlist(step, o.name))
            yield broken


@mutant("saved-state")
def saved_state_kept_and_not_used(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        for process, i, step in tasks(plan, "prefix_backward") if o.attached and o.class_ == "phase-local" else ():
            if o.name in (*step.reads, *step.streams):
                yield put(plan, process, i, unlist(step, o.name))


@mutant("attached")
def boundary_detached(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        if o.class_ == "boundary":
            yield with_object(plan, o.name, attached=not o.attached)
