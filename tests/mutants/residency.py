"""Faults of residency: what is used where it is not, lost, or moved while it must stay."""

from __future__ import annotations

from collections.abc import Iterator

from mutants.edit import change, insert, move, mutant, objects, put, steps, unlist, uses, with_object
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Drop, Fetch, Map, Offload, Run, Unmap, UpdateChunk

LEAVE = (Unmap, Offload, Drop)


def owned(plan: Plan, process: str, *classes: str) -> list[str]:
    """Objects of these classes that a program owns."""
    return [o.name for o in plan.summary.objects if o.process == process and o.class_ in classes]


@mutant("not-mapped")
def fetch_dropped(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Fetch):
        if uses(plan, process, step.object, i):
            yield put(plan, process, i)


@mutant("not-mapped")
def map_dropped(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Map):
        if not step.imported and uses(plan, process, step.object, i):
            yield put(plan, process, i)


@mutant("not-imported")
def import_dropped(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Map):
        if step.imported and uses(plan, process, step.object, i):
            yield put(plan, process, i)


@mutant("not-produced", "end-state")
def fetch_without_copy(plan: Plan) -> Iterator[Plan]:
    """Fresh pages where contents are needed, by a task or by the next iteration."""
    for process, i, step in steps(plan, Fetch):
        yield put(plan, process, i, Map(window=step.window, object=step.object))


@mutant("not-mapped")
def mapped_late(plan: Plan) -> Iterator[Plan]:
    """A map or fetch stands behind the first use."""
    for process, i, step in steps(plan, Map, Fetch):
        if isinstance(step, Map) and step.imported:
            continue
        if found := uses(plan, process, step.object, i):
            yield move(plan, process, i, found[0])


@mutant("not-imported")
def imported_late(plan: Plan) -> Iterator[Plan]:
    """Pages of another process are mapped behind their first use."""
    for process, i, step in steps(plan, Map):
        if step.imported and (found := uses(plan, process, step.object, i)):
            yield move(plan, process, i, found[0])


@mutant("not-mapped", "boundary-moved")
def unmapped_early(plan: Plan) -> Iterator[Plan]:
    """An object leaves before its last use."""
    for process, i, step in steps(plan, *LEAVE):
        if isinstance(step, Unmap) and step.imported:
            continue
        if found := [j for j in uses(plan, process, step.object) if j < i]:
            yield move(plan, process, i, found[-1])


@mutant("not-mapped")
def rollout_memory_unmapped_during_generate(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Run):
        if step.task == "generate":
            for name in step.writes:
                yield insert(plan, process, i, Unmap(window=step.window, object=name))


@mutant("double-map")
def mapped_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Map, Fetch):
        yield put(plan, process, i, step, step)


@mutant("double-map")
def resident_object_mapped(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        if o.start == "hbm":
            first = plan.programs[o.process][0]
            yield insert(plan, o.process, 0, Map(window=first.window, object=o.name))


@mutant("not-held")
def unmapped_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Unmap, Offload):
        yield put(plan, process, i, step, step)


@mutant("boundary-moved")
def boundary_offloaded_before_its_suffix(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Run):
        if step.task in ("suffix", "train"):
            for name in sorted({*step.reads} & {*owned(plan, process, "boundary")}):
                away = Offload(window=step.window, object=name), Fetch(window=step.window, object=name)
                yield insert(plan, process, i, *away)


@mutant("permanent-lost")
def permanent_dropped(plan: Plan) -> Iterator[Plan]:
    for process in plan.programs:
        for name in owned(plan, process, "permanent"):
            for _, i, step in steps(plan, process=process):
                yield insert(plan, process, i, Drop(window=step.window, object=name))


@mutant("permanent-lost")
def permanent_unmapped_instead_of_offloaded(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Offload):
        if step.object in owned(plan, process, "permanent"):
            yield put(plan, process, i, Unmap(window=step.window, object=step.object))


@mutant("dropped-needed")
def weights_dropped_before_a_read(plan: Plan) -> Iterator[Plan]:
    """Regenerable state is dropped, and nothing makes it again before this read."""
    for process, i, step in steps(plan, Run):
        for name in sorted({*step.reads} & {*owned(plan, process, "regenerable")}):
            yield insert(plan, process, i, Drop(window=step.window, object=name))


@mutant("no-host-copy")
def saved_state_streamed_from_nowhere(plan: Plan) -> Iterator[Plan]:
    """One prefix keeps its saved state to itself; its backward still streams it in (a step may leave its group)."""
    back = {(s.role, s.microbatch) for _, _, s in steps(plan, Run) if s.task == "prefix_backward"}
    for process, i, step in steps(plan, Run):
        for name in step.streams if step.task == "prefix" and (step.role, step.microbatch) in back else ():
            yield put(plan, process, i, unlist(step, name))


@mutant("no-host-copy")
def gradients_unmapped_instead_of_offloaded(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Offload):
        later = [s for _, j, s in steps(plan, UpdateChunk, process=process) if j > i]
        if any(step.object in s.streams for s in later) and step.object not in owned(plan, process, "permanent"):
            yield put(plan, process, i, Unmap(window=step.window, object=step.object))


@mutant("no-host-copy")
def fetched_from_nowhere(plan: Plan) -> Iterator[Plan]:
    """Phase-local state is fetched, and no host has it."""
    for process, i, step in steps(plan, Map):
        if objects(plan)[step.object].class_ in ("phase-local", "boundary"):
            yield put(plan, process, i, Fetch(window=step.window, object=step.object))


@mutant("offload-undefined")
def offloaded_before_produced(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Map):
        away = Offload(window=step.window, object=step.object), Fetch(window=step.window, object=step.object)
        if not step.imported:
            yield put(plan, process, i, step, *away)


@mutant("frozen-written")
def frozen_weights_written(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Run):
        for name in step.reads:
            if objects(plan)[name].host_backed:
                yield put(plan, process, i, change(step, writes=(*step.writes, name)))


@mutant("write-outside-update")
def snapshot_written_by_a_task(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Run):
        for name in sorted({*step.reads} & {*owned(plan, process, "regenerable")}):
            if not objects(plan)[name].host_backed:
                yield put(plan, process, i, change(step, writes=(*step.writes, name)))


@mutant("end-state")
def left_behind(plan: Plan) -> Iterator[Plan]:
    """The last step that releases an object is missing: it is still there when the next iteration begins."""
    last = {s.object: (p, i) for p, i, s in steps(plan, *LEAVE)}
    for name, (process, i) in last.items():
        if not any(s.object == name for _, j, s in steps(plan, Map, Fetch, process=process) if j > i):
            yield put(plan, process, i)


@mutant("end-state", "residency-table")
def starts_elsewhere(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        if o.start != "hbm":
            yield with_object(plan, o.name, start="hbm")


@mutant("start-state")
def permanent_starts_nowhere(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        if o.class_ == "permanent":
            yield with_object(plan, o.name, start="dropped")


@mutant("start-state")
def phase_local_starts_at_the_host(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        if o.class_ in ("phase-local", "boundary"):
            yield with_object(plan, o.name, start="host")
