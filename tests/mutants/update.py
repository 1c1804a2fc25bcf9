"""Faults of phase P3: chunks, gradients, exchange, rebuild and publication."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from mutants.edit import (
    change,
    insert,
    move,
    mutant,
    objects,
    place,
    put,
    steps,
    unlist,
    with_layout,
    with_object,
    without,
)
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange, Publish, Rebuild, Run, UpdateChunk

ADAM = "permanent"


def chunks(plan: Plan) -> list[tuple[str, int, UpdateChunk]]:
    """All chunks in order."""
    return list(steps(plan, UpdateChunk))


def several(plan: Plan, step: UpdateChunk) -> bool:
    """Whether the role of a chunk has others."""
    return sum(c.role == step.role for _, _, c in chunks(plan)) > 1


@mutant("update-before-quiet")
def update_before_theta_quiet(plan: Plan) -> Iterator[Plan]:
    """A chunk stands before the barrier, in the last window of P2."""
    for process, i, step in (*chunks(plan), *steps(plan, Publish, Rebuild)):
        to = place(plan, process, "theta-quiet")
        window = plan.programs[process][to].window
        yield move(put(plan, process, i, change(step, window=window)), process, i, to)


@mutant("read-after-quiet")
def read_after_theta_quiet(plan: Plan) -> Iterator[Plan]:
    for process, _, step in steps(plan, Run):
        if step.task in ("generate", "prefix", "suffix", "train"):
            changed = {n for _, _, c in chunks(plan) for n in c.writes}
            if changed.intersection(step.reads):
                to = place(plan, process, "theta-quiet") + 1
                window = plan.programs[process][to].window
                yield insert(plan, process, to, change(step, window=window))


@mutant("chunk-size")
def chunk_missing(plan: Plan) -> Iterator[Plan]:
    for process, i, step in chunks(plan):
        if several(plan, step):
            yield put(plan, process, i)


@mutant("chunk-cover")
def chunk_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in chunks(plan):
        yield put(plan, process, i, step, step)


@mutant("chunk-cover")
def chunks_overlap(plan: Plan) -> Iterator[Plan]:
    for process, i, step in chunks(plan)[1:]:
        yield put(plan, process, i, change(step, start=step.start - 1))


@mutant("chunk-cover")
def chunks_leave_a_gap(plan: Plan) -> Iterator[Plan]:
    for process, i, step in chunks(plan):
        yield put(plan, process, i, change(step, start=step.start + 1))


@mutant("chunk-cover")
def chunk_beyond_the_end(plan: Plan) -> Iterator[Plan]:
    process, i, step = chunks(plan)[-1]
    yield put(plan, process, i, change(step, stop=step.stop * 2))


@mutant("chunk-cover")
def chunks_swapped(plan: Plan) -> Iterator[Plan]:
    for (process, i, a), (_, j, b) in pairwise(chunks(plan)):
        if b.index:
            yield put(put(plan, process, i, b), process, j, a)


@mutant("chunk-size")
def chunk_of_another_size(plan: Plan) -> Iterator[Plan]:
    """Two neighbours share their elements in another way."""
    found = chunks(plan)
    for (process, i, a), (_, j, b) in pairwise(found):
        yield put(put(plan, process, i, change(a, stop=a.stop - 1)), process, j, change(b, start=b.start - 1))


@mutant("chunk-state")
def chunk_without_its_state(plan: Plan) -> Iterator[Plan]:
    norms = {n for _, _, s in steps(plan, Run) if s.task == "grad_norm" for n in s.reads}
    for process, i, step in chunks(plan):
        for name in (*step.reads, *step.streams):
            if objects(plan)[name].class_ == ADAM or name in norms:
                yield put(plan, process, i, unlist(step, name))


@mutant("chunk-state")
def chunk_leaves_the_snapshot(plan: Plan) -> Iterator[Plan]:
    published = {s.object for _, _, s in steps(plan, Publish)}
    for process, i, step in chunks(plan):
        for name in sorted(published.intersection(step.writes)):
            yield put(plan, process, i, change(step, writes=without(step.writes, name)))


@mutant("chunk-state")
def chunk_hides_its_workspace(plan: Plan) -> Iterator[Plan]:
    for process, i, step in chunks(plan):
        for name in step.writes if several(plan, step) else ():
            yield put(plan, process, i, change(step, writes=without(step.writes, name)))


def norms(plan: Plan) -> list[tuple[str, int, Run]]:
    """Where gradient norms are taken."""
    return [(p, i, s) for p, i, s in steps(plan, Run) if s.task == "grad_norm"]


@mutant("gradient-final")
def norm_before_the_last_backward(plan: Plan) -> Iterator[Plan]:
    for process, i, step in norms(plan):
        for _, j, s in steps(plan, Run, process=process):
            if s.task in ("train", "prefix_backward") and s.role == step.role:
                yield move(plan, process, i, j)


@mutant("gradient-final")
def norm_after_the_first_chunk(plan: Plan) -> Iterator[Plan]:
    for process, i, step in norms(plan):
        yield move(plan, process, i, next(j for _, j, c in chunks(plan) if c.role == step.role))


@mutant("gradient-final")
def norm_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in norms(plan):
        yield put(plan, process, i, step, step)


@mutant("missing-exchange")
def gradients_not_reduced(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Exchange):
        if step.op == "all_reduce":
            yield put(plan, process, i)


@mutant("missing-exchange")
def gradients_reduced_after_their_norm(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Exchange):
        if step.op == "all_reduce":
            yield move(plan, process, i, norms(plan)[0][1])


def gathers(plan: Plan) -> Iterator[tuple[str, int, Exchange]]:
    """Exchanges in which ranks write into each other's shared snapshots."""
    for process, i, step in steps(plan, Exchange):
        if step.op == "write" and plan.summary.layout.q > 1 and objects(plan)[step.object].readers:
            yield process, i, step


@mutant("missing-exchange")
def pieces_not_gathered(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in gathers(plan):
        yield put(plan, process, i)


@mutant("missing-exchange")
def pieces_gathered(plan: Plan) -> Iterator[Plan]:
    """By a collective, which nobody runs over q."""
    for process, i, step in gathers(plan):
        yield put(plan, process, i, change(step, op="all_gather"))


@mutant("missing-exchange")
def too_few_bytes_gathered(plan: Plan) -> Iterator[Plan]:
    for process, i, step in gathers(plan):
        yield put(plan, process, i, change(step, nbytes=step.nbytes - 1))


@mutant("missing-exchange")
def pieces_gathered_before_the_last_chunk(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in gathers(plan):
        yield move(plan, process, i, chunks(plan)[-1][1])


@mutant("missing-rebuild")
def copy_not_rebuilt(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in steps(plan, Rebuild):
        yield put(plan, process, i)


@mutant("missing-rebuild")
def copy_rebuilt_from_something_else(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Rebuild):
        yield put(plan, process, i, change(step, reads=()))


@mutant("publish-order")
def copy_rebuilt_too_early(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in steps(plan, Rebuild):
        yield move(plan, process, i, chunks(plan)[-1][1])


@mutant("missing-rebuild")
def copy_not_refreshed(plan: Plan) -> Iterator[Plan]:
    """Without weight sharing the rollout engine has a copy of its own, and it stays at theta_k."""
    for process, i, step in steps(plan, Exchange):
        if step.op == "all_gather" and process != chunks(plan)[0][0]:
            yield put(plan, process, i)


@mutant("missing-exchange")
def copy_refreshed_from_nothing(plan: Plan) -> Iterator[Plan]:
    """The updating process does not enter the exchange that fills the rollout engine's copy."""
    groups = {s.group for p, _, s in steps(plan, Exchange) if p != chunks(plan)[0][0]}
    for process, i, step in steps(plan, Exchange):
        if process == chunks(plan)[0][0] and step.group in groups:
            yield put(plan, process, i)


@mutant("publish")
def not_published(plan: Plan) -> Iterator[Plan]:
    for process, i, _ in steps(plan, Publish):
        yield put(plan, process, i)


@mutant("publish")
def published_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Publish):
        yield put(plan, process, i, step, step)


@mutant("publish-order")
def published_too_early(plan: Plan) -> Iterator[Plan]:
    """Before the last chunk, and before the steps that complete the snapshot."""
    for process, i, _ in steps(plan, Publish):
        for _, j, s in steps(plan, UpdateChunk, Exchange, Rebuild, process=process):
            if place(plan, process, "theta-quiet") < j < i and getattr(s, "op", "") != "all_reduce":
                yield move(plan, process, i, j)


@mutant("publish")
def something_else_published(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Publish):
        for name, o in objects(plan).items():
            if o.process == process and o.class_ != "regenerable":
                yield put(plan, process, i, change(step, object=name))


@mutant("layout")
def q_of_other_degrees(plan: Plan) -> Iterator[Plan]:
    if any(o.readers for o in plan.summary.objects):
        yield with_layout(plan, q=plan.summary.layout.q + 1)


@mutant("layout")
def ranks_of_other_degrees(plan: Plan) -> Iterator[Plan]:
    for name, kind in plan.processes.items():
        other = kind.model_copy(update={"data_parallel": kind.data_parallel + 1})
        yield plan.model_copy(update={"processes": {**plan.processes, name: other}})


@mutant("missing-exchange")
def exchange_over_another_group(plan: Plan) -> Iterator[Plan]:
    reduces = [(p, i, s) for p, i, s in steps(plan, Exchange) if s.op == "all_reduce"]
    for process, i, step in (*reduces, *gathers(plan)):
        yield put(plan, process, i, change(step, group="tp"))


@mutant("missing-rebuild")
def layout_with_other_case_3(plan: Plan) -> Iterator[Plan]:
    if any(objects(plan)[s.object].readers for _, _, s in steps(plan, Publish)):
        yield with_layout(plan, case3_buffer_bytes=0 if plan.summary.layout.case3_buffer_bytes else 4096)


@mutant("missing-exchange")
def layout_with_other_exchange(plan: Plan) -> Iterator[Plan]:
    for _, _, step in gathers(plan):
        yield with_layout(plan, exchange_bytes_per_gpu=step.nbytes + 1)


@mutant("chunk-state")
def updated_in_place_behind_the_host_copy(plan: Plan) -> Iterator[Plan]:
    """Adam state is fetched, changed in HBM, and not marked as written: its old copy would be taken for valid."""
    fetched = {s.object for _, _, s in steps(plan) if s.kind == "fetch"}
    for process, i, step in chunks(plan):
        for name in sorted(fetched.intersection(step.reads, step.writes)):
            yield put(plan, process, i, change(step, writes=without(step.writes, name)))


@mutant("end-state", "start-state", "permanent-lost", "no-host-copy", "chunk-state", "not-produced")
def adam_state_of_another_class(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        if o.class_ == ADAM and o.start == "host":
            yield with_object(plan, o.name, class_="phase-local")
