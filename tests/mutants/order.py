"""Faults of order: events, values, collectives, and pages that change under a reader."""

from __future__ import annotations

from collections.abc import Iterator

from mutants.edit import change, insert, move, mutant, objects, place, put, steps, without
from rollplex.ir.parts import whole
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange, Map, Run, Signal, Step, Unmap, UpdateChunk, Wait

RESPONSES = ("suffix", "train")


def carried(plan: Plan, event: str) -> tuple[str, ...]:
    """What an event carries."""
    return next(s.carries for _, _, s in steps(plan, Signal) if s.event == event)


def taken(plan: Plan, process: str, names: tuple[str, ...]) -> bool:
    """Whether a program's tasks take one of these values."""
    return any(set(names) & set(s.inputs) for _, _, s in steps(plan, Run, process=process))


@mutant("missing-value")
def wait_for_a_value_dropped(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Wait):
        if taken(plan, process, carried(plan, step.event)):
            yield put(plan, process, i)


@mutant("unheard-signal")
def wait_for_freed_pages_dropped(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Wait):
        if not carried(plan, step.event):
            yield put(plan, process, i)


@mutant("window-bytes")
def pages_freed_after_the_signal(plan: Plan) -> Iterator[Plan]:
    """The event that frees pages is signalled before they are unmapped: both engines hold theirs in P2."""
    for process, i, step in steps(plan, Signal):
        before = plan.programs[process][i - 1]
        if not step.carries and isinstance(before, Unmap) and not before.imported:
            yield move(plan, process, i, i - 1)


@mutant("event")
def signal_dropped(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in steps(plan, Signal):
        yield put(plan, process, i)


@mutant("event")
def signal_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Signal):
        yield put(plan, process, i, step, step)


@mutant("event")
def wait_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Wait):
        yield put(plan, process, i, step, step)


@mutant("event")
def wrong_event(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Wait):
        yield put(plan, process, i, change(step, event=step.event + "2"))


@mutant("deadlock")
def cyclic_wait(plan: Plan) -> Iterator[Plan]:
    """The signaller first waits for an event that the waiter signals afterwards."""
    for signaller, j, signal in steps(plan, Signal):
        for waiter, i, wait in steps(plan, Wait):
            if wait.event == signal.event:
                late = Signal(window=wait.window, event="late")
                early = Wait(window=signal.window, event="late")
                yield insert(insert(plan, waiter, i + 1, late), signaller, j, early)


@mutant("deadlock")
def signal_behind_a_barrier(plan: Plan) -> Iterator[Plan]:
    """A signal moves behind the next barrier, which its waiter meets only after the wait."""
    for process, j, signal in steps(plan, Signal):
        barrier = next(s for _, i, s in steps(plan, process=process) if i > j and s.kind == "barrier")
        waiters = [(p, i) for p, i, s in steps(plan, Wait) if s.event == signal.event]
        if any(i < place(plan, p, barrier.name) for p, i in waiters):
            yield move(plan, process, j, place(plan, process, barrier.name))


@mutant("missing-value")
def value_not_carried(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Signal):
        for name in step.carries:
            if any(taken(plan, p, (name,)) for p, _, s in steps(plan, Wait) if s.event == step.event):
                yield put(plan, process, i, change(step, carries=without(step.carries, name)))


@mutant("missing-value")
def value_nobody_has(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Signal):
        yield put(plan, process, i, change(step, carries=(*step.carries, "gold")))
    for process, i, step in steps(plan, Run):
        yield put(plan, process, i, change(step, inputs=(*step.inputs, "gold")))


@mutant("missing-value")
def value_of_another_group(plan: Plan) -> Iterator[Plan]:
    """A group's train step comes before its reference suffix."""
    for process, i, step in steps(plan, Run):
        if step.task == "suffix" and taken(plan, process, step.outputs):
            train = [j for _, j, s in steps(plan, Run, process=process) if s.task == "train"]
            last = [j for j in train if plan.programs[process][j].microbatch == step.microbatch]  # type: ignore[union-attr]
            yield move(plan, process, i, last[-1])


@mutant("missing-input")
def input_left_out(plan: Plan) -> Iterator[Plan]:
    """A task does not take a value that its graph node is made of."""
    names = {r.name for r in plan.graph}
    for process, i, step in steps(plan, Run):
        if step.task in ("generate", "prefix", "suffix"):
            for name in sorted(names.intersection(step.inputs)):
                yield put(plan, process, i, change(step, inputs=without(step.inputs, name)))


@mutant("missing-input")
def loss_without_responses(plan: Plan) -> Iterator[Plan]:
    generated = {r.name for r in plan.graph if r.op == "rx.generate"}
    for process, i, step in steps(plan, Run):
        if step.task == "train":
            for name in (n for n in step.inputs if whole(n) in generated):
                yield put(plan, process, i, change(step, inputs=without(step.inputs, name)))


@mutant("suffix-before-rollout")
def suffix_before_rollout(plan: Plan) -> Iterator[Plan]:
    """Where all responses come together; of groups that come one by one see streamed.py."""
    for process, i, step in steps(plan, Run) if plan.schedule != "streamed" else ():
        if step.task in RESPONSES:
            yield move(plan, process, i, place(plan, process, "rollout-complete"))


@mutant("suffix-before-rollout")
def rollout_behind_its_barrier(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Run):
        if step.task == "generate":
            yield move(plan, process, i, place(plan, process, "rollout-complete"))


@mutant("collective-order")
def exchange_of_two_programs_differs(plan: Plan) -> Iterator[Plan]:
    """Only for groups that several programs enter: a second copy of the weights is refreshed that way."""
    groups = [(p, s.group) for p, _, s in steps(plan, Exchange)]
    for process, i, step in steps(plan, Exchange):
        if any(p != process and g == step.group for p, g in groups):
            yield put(plan, process, i, change(step, nbytes=step.nbytes + 1))


def shared(plan: Plan) -> dict[str, str]:
    """Objects whose pages other processes import, and their owner."""
    return {o.name: o.process for o in plan.summary.objects if o.readers}


@mutant("race")
def chunk_while_others_read(plan: Plan) -> Iterator[Plan]:
    """A chunk of the update at the start of the program: rollout decodes under theta_k meanwhile."""
    for process, i, step in steps(plan, UpdateChunk):
        if set(step.writes) & set(shared(plan)):
            yield move(plan, process, i, 0)


@mutant("race")
def exchange_while_others_read(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Exchange):
        if step.object in shared(plan):
            yield move(plan, process, i, 0)


@mutant("imported-pages")
def imported_pages_remapped(plan: Plan) -> Iterator[Plan]:
    """The owner unmaps and maps again what readers import for the whole run, anywhere in its program."""
    bound_again = {step.object for _, _, step in steps(plan, Map) if step.imported}
    for name, owner in shared(plan).items():
        if objects(plan)[name].start == "hbm" and name not in bound_again:
            for _, i, step in steps(plan, process=owner):
                yield insert(plan, owner, i, *_remap(name, step))


def _remap(name: str, step: Step) -> tuple[Step, Step]:
    return Unmap(window=step.window, object=name), Map(window=step.window, object=name)
