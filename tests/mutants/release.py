"""Faults of a snapshot that is released: pages gone under a reader, missing under a chunk, published before taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mutants.agree import with_job
from mutants.edit import change, insert, move, mutant, put, steps, summarise, with_object, with_window
from rollplex.ir.plan import Plan
from rollplex.ir.steps import (
    Barrier,
    Exchange,
    Export,
    Map,
    MapPart,
    Publish,
    Signal,
    Unmap,
    UnmapPart,
    UpdateChunk,
    Wait,
)


def released(plan: Plan) -> Iterator[tuple[str, int, Any]]:
    """Where the owner lets its pages go; nowhere in a plan that keeps them."""
    names = {step.object for _, _, step in steps(plan, MapPart)}
    return ((p, i, s) for p, i, s in steps(plan, Unmap) if s.object in names and not s.imported)


def events(plan: Plan, process: str, kind: type, name: str) -> Iterator[int]:
    """Where a program signals an event, or waits for it; nowhere in a plan that shares nothing."""
    return (i for _, i, s in steps(plan, kind, process=process) if s.event == name)


@mutant("imported-pages")
def pages_let_go_while_a_reader_may_map_them(plan: Plan) -> Iterator[Plan]:
    """The owner does not wait for it."""
    for process, i, _ in released(plan):
        yield from (move(plan, process, i, at) for at in events(plan, process, Wait, "snapshot-let-go"))


@mutant("imported-pages")
def reader_that_never_lets_go(plan: Plan) -> Iterator[Plan]:
    for _, _, own in released(plan):
        for process, i, step in steps(plan, Unmap):
            if step.imported and step.object == own.object:
                again = next(j for _, j, s in steps(plan, Map, process=process) if s.object == own.object)
                yield put(put(plan, process, again), process, i)


def of_peers(plan: Plan, kind: type) -> Iterator[tuple[str, int, Any]]:
    """Where an owner's ranks map each other's pages, or let them go."""
    owner = {o.name: o.process for o in plan.summary.objects}
    return ((p, i, s) for p, i, s in steps(plan, kind) if s.imported and owner[s.object] == p)


@mutant("imported-pages")
def peers_pages_kept_past_the_barrier(plan: Plan) -> Iterator[Plan]:
    """A rank lets them go and unmaps its own, of which another rank, which is slower, has not let go."""
    for process, i, _ in of_peers(plan, Unmap):
        yield move(plan, process, i, next(j for _, j, _ in steps(plan, Barrier, process=process) if j > i) + 1)


@mutant("imported-pages")
def peers_pages_never_let_go(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in of_peers(plan, Unmap):
        again = next(j for _, j, _ in of_peers(plan, Map))
        yield put(put(plan, process, again), process, i)


@mutant("not-imported")
def peers_pages_written_before_they_are_mapped(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in of_peers(plan, Map):
        write = next(j for _, j, s in steps(plan, Exchange, process=process) if s.op == "write")
        yield move(plan, process, write, i)


@mutant("handed-out")
def peers_pages_mapped_before_they_are_handed_out(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in of_peers(plan, Map):
        yield from (move(plan, process, i, j) for _, j, _ in steps(plan, Export, process=process))


@mutant("not-owner")
def own_pages_imported(plan: Plan) -> Iterator[Plan]:
    """Of what no peer writes."""
    written = {s.object for _, _, s in steps(plan, Exchange) if s.op == "write"}
    for process, i, step in steps(plan, Publish):
        for o in plan.summary.objects:
            if o.process == process and o.name not in written:
                yield insert(plan, process, i, Map(window=step.window, object=o.name, imported=True))


@mutant("not-mapped")
def chunk_before_its_pages(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in steps(plan, MapPart):
        yield move(plan, process, i, i + 1)


@mutant("not-mapped")
def pages_that_do_not_come(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in steps(plan, MapPart):
        yield put(plan, process, i)


@mutant("not-mapped")
def pages_that_come_a_page_short(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, MapPart):
        yield put(plan, process, i, change(step, stop=step.stop - (2 << 20)))


@mutant("double-map")
def pages_that_come_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, MapPart):
        yield insert(plan, process, i, step)


@mutant("not-mapped")
def gradients_that_go_before_their_chunk(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in steps(plan, UnmapPart):
        yield move(plan, process, i, i - 1)


@mutant("not-held")
def gradients_that_go_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, UnmapPart):
        yield insert(plan, process, i, step)


@mutant("end-state")
def gradients_that_stay_behind(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in steps(plan, UnmapPart):
        yield put(plan, process, i)


@mutant("part")
def part_of_a_page(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, MapPart, UnmapPart):
        yield put(plan, process, i, change(step, stop=step.stop - 512))


@mutant("part")
def part_of_another_object(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, MapPart, UnmapPart):
        for o in plan.summary.objects:
            if o.process == process and o.name != step.object and o.bytes >= step.stop:
                yield put(plan, process, i, change(step, object=o.name))


@mutant("publish-order")
def published_before_the_readers_have_its_pages(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in released(plan):
        for _, j, step in steps(plan, Publish, process=process):
            if step.object == plan.programs[process][i].object:  # type: ignore[union-attr]
                yield from (move(plan, process, j, at) for at in events(plan, process, Wait, "snapshot-taken"))


@mutant("import-start")
def import_that_an_iteration_begins_without(plan: Plan) -> Iterator[Plan]:
    """A reader lets go at the end of an iteration of what it maps at the start: the first one finds it mapped."""
    for o in plan.summary.objects:
        for process in o.readers:
            own = [(i, s) for _, i, s in steps(plan, Map, Unmap, process=process) if s.imported and s.object == o.name]
            if own:
                (first, away), (last, back) = own
                ends = change(back, window=away.window), change(away, window=back.window)
                yield put(put(plan, process, last, ends[1]), process, first, ends[0])
            else:
                program = plan.programs[process]
                away, back = (
                    kind(window=program[i].window, object=o.name, imported=True) for kind, i in ((Map, 0), (Unmap, -1))
                )
                yield insert(insert(plan, process, len(program) - 1, back), process, 0, away)


@mutant("import-start")
def import_of_what_has_no_pages_yet(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        if o.readers:
            yield from (with_object(plan, o.name, start=place) for place in ("host", "dropped", "-"))


@mutant("handed-out")
def pages_imported_before_they_are_handed_out(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Map):
        if step.imported:
            yield from (move(plan, process, i, at) for at in events(plan, process, Wait, "snapshot-has-pages"))


@mutant("handed-out")
def pages_that_nobody_hands_out(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Export):
        yield put(plan, process, i)
        yield insert(plan, process, i, step)


@mutant("not-produced")
def handed_out_before_the_last_chunk(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in steps(plan, Export):
        last = max(j for _, j, _ in steps(plan, UpdateChunk, process=process))
        yield move(plan, process, i, last)


@mutant("handed-out")
def handed_out_behind_its_signal(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in steps(plan, Export):
        yield from (move(plan, process, i, at) for at in events(plan, process, Signal, "snapshot-has-pages"))


@mutant("released")
def weights_without_masters_discarded(plan: Plan) -> Iterator[Plan]:
    """A tower or a base that is in HBM alone: mapped again, it holds nothing."""
    written = {n for _, _, chunk in steps(plan, UpdateChunk) for n in chunk.writes}
    for o in plan.summary.objects:
        if o.class_ == "regenerable" and o.start == "hbm" and not o.host_backed and o.name not in written:
            for process, i, _ in steps(plan, UpdateChunk, process=o.process):
                window = plan.programs[process][i].window
                pages = Unmap(window=window, object=o.name), Map(window=window, object=o.name)
                yield insert(plan, process, i, *pages)
                break


@mutant("asked")
def release_that_the_job_forbids(plan: Plan) -> Iterator[Plan]:
    for _ in released(plan):
        yield with_job(plan, "optimizer", "snapshot", value="keep")


@mutant("asked")
def release_that_the_job_wants(plan: Plan) -> Iterator[Plan]:
    if not list(released(plan)):
        yield with_job(plan, "optimizer", "snapshot", value="release")


@mutant("capacity")
def update_that_has_no_room_for_what_grows(plan: Plan) -> Iterator[Plan]:
    """By a page; the job's capacity is edited with the summary's."""
    window = next((w for w in plan.summary.windows for _ in released(plan) if w.name.startswith("P3 update")), None)
    if window and plan.feasible:
        gib = (window.hbm_bytes - 1) / 2**30
        small = with_job(plan, "cluster", "capacity_gib", value=gib)
        yield summarise(small, capacity_bytes=window.hbm_bytes - 1)


@mutant("window-bytes")
def window_that_counts_both_whole(plan: Plan) -> Iterator[Plan]:
    """Or what there is of them at another moment."""
    names = {step.object for _, _, step in steps(plan, MapPart, UnmapPart)}
    for w in plan.summary.windows:
        cut = {o.name: o.bytes for o in plan.summary.objects if o.name in names and o.name in w.by_object}
        if any(w.by_object[name] != nbytes for name, nbytes in cut.items()):
            whole = {**w.by_object, **cut}
            yield with_window(plan, w.name, by_object=whole, hbm_bytes=sum(whole.values()))
