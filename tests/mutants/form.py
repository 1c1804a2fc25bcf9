"""Faults of form: names, owners, windows and barriers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from mutants.edit import change, insert, move, mutant, objects, put, steps, summarise, with_object, with_window
from rollplex.ir.plan import BARRIERS, Plan
from rollplex.ir.steps import Barrier, Drop, Fetch, Map, Offload, Run, Unmap

MOVES = (Map, Unmap, Fetch, Offload, Drop)


@mutant("schema")
def another_schema_version(plan: Plan) -> Iterator[Plan]:
    yield plan.model_copy(update={"schema_version": plan.schema_version + 1})


@mutant("unknown-name")
def unknown_object(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, *MOVES):
        yield put(plan, process, i, change(step, object=step.object + "2"))
    for process, i, step in steps(plan, Run):
        if step.reads:
            yield put(plan, process, i, change(step, reads=(*step.reads, "actor.nothing")))


@mutant("unknown-name")
def unknown_window(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan):
        yield put(plan, process, i, change(step, window="P4 rest"))


@mutant("unknown-name")
def unknown_process(plan: Plan) -> Iterator[Plan]:
    for name, o in objects(plan).items():
        yield with_object(plan, name, readers=(*o.readers, "nobody"))
    yield plan.model_copy(update={"programs": {**plan.programs, "nobody": plan.programs["controller"]}})


@mutant("unknown-name")
def unknown_object_in_a_window(plan: Plan) -> Iterator[Plan]:
    for w in plan.summary.windows:
        yield with_window(plan, w.name, by_object={**w.by_object, "actor.nothing": 0})


@mutant("duplicate-name")
def object_twice(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        yield summarise(plan, objects=(*plan.summary.objects, o))


@mutant("not-owner")
def wrong_owner(plan: Plan) -> Iterator[Plan]:
    """Somebody else owns what a program moves or writes."""
    for name in sorted({s.object for _, _, s in steps(plan, *MOVES)}):
        yield with_object(plan, name, process="controller", readers=("train", "rollout"))


@mutant("not-imported")
def missing_import(plan: Plan) -> Iterator[Plan]:
    """A reader no longer imports the weights it reads."""
    read = {(process, n) for process, _, s in steps(plan, Run) for n in s.reads}
    for name, o in objects(plan).items():
        for reader in o.readers:
            if (reader, name) in read:
                yield with_object(plan, name, readers=tuple(r for r in o.readers if r != reader))


@mutant("window-order")
def windows_swapped(plan: Plan) -> Iterator[Plan]:
    listed = list(plan.summary.windows)
    for i in range(len(listed) - 1):
        yield summarise(plan, windows=(*listed[:i], listed[i + 1], listed[i], *listed[i + 2 :]))


@mutant("window-order")
def window_reentered(plan: Plan) -> Iterator[Plan]:
    """The last step of a window stands behind the first of the next."""
    program = plan.programs["train"]
    for i in range(len(program) - 2):
        if program[i].window != program[i + 1].window == program[i + 2].window:
            yield move(plan, "train", i, i + 1)


@mutant("barrier")
def barrier_removed_in_one_process(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in steps(plan, Barrier):
        yield put(plan, process, i)


@mutant("barrier")
def barrier_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Barrier):
        yield put(plan, process, i, step, step)


@mutant("barrier")
def barrier_renamed(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Barrier):
        yield put(plan, process, i, change(step, name=step.name + "d"))


@mutant("barrier")
def barrier_dropped_everywhere(plan: Plan) -> Iterator[Plan]:
    """All processes agree, and theta_k is still not safe."""
    for name in BARRIERS:
        kept = {p: tuple(s for s in ss if getattr(s, "name", "") != name) for p, ss in plan.programs.items()}
        yield plan.model_copy(update={"programs": kept})


@mutant("collective-order")
def barriers_swapped_in_one_process(plan: Plan) -> Iterator[Plan]:
    for process in plan.programs:
        found = [(i, s) for _, i, s in steps(plan, Barrier, process=process)]
        for (i, a), (j, b) in pairwise(found):
            yield put(put(plan, process, i, change(a, name=b.name)), process, j, change(b, name=a.name))


@mutant("after-published")
def step_behind_the_last_barrier(plan: Plan) -> Iterator[Plan]:
    """A step moves behind `published`, where the next iteration may have begun."""
    for process, program in plan.programs.items():
        for i in range(len(program) - 1):
            if not isinstance(program[i], Barrier):
                yield move(plan, process, i, len(program) - 1)


@mutant("phase")
def work_in_the_wrong_phase(plan: Plan) -> Iterator[Plan]:
    """A run moves over a barrier and keeps its window."""
    for process in plan.programs:
        barriers = [i for _, i, _ in steps(plan, Barrier, process=process)]
        for _, i, _ in steps(plan, Run, process=process):
            yield from (move(plan, process, i, b) for b in barriers if b > i)
            yield from (move(plan, process, i, b) for b in barriers if b < i)


@mutant("phase")
def window_of_another_phase(plan: Plan) -> Iterator[Plan]:
    for w in plan.summary.windows:
        for phase in sorted({"P1", "P2", "P3"} - {w.phase}):
            if any(s.window == w.name for _, _, s in steps(plan, Run, Barrier)):
                yield with_window(plan, w.name, phase=phase)


@mutant("not-owner")
def import_of_own_pages(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Map):
        if not step.imported:
            yield insert(plan, process, i, change(step, imported=True))
