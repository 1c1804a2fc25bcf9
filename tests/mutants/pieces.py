"""Faults of what leaves in pieces: a piece missing, twice, early, out of turn, unreduced; a use behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mutants.edit import change, insert, mutant, put, steps, summarise
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange, Offload, Run


def leaving(plan: Plan) -> Iterator[tuple[str, int, Any]]:
    """Steps with pieces."""
    return ((process, i, step) for process, i, step in steps(plan, Run) if step.offloads)


def with_pieces(plan: Plan, process: str, i: int, *pieces: Any) -> Plan:
    return put(plan, process, i, change(plan.programs[process][i], offloads=pieces))


@mutant("piece")
def piece_left_out(plan: Plan) -> Iterator[Plan]:
    for process, i, step in leaving(plan):
        for k in range(len(step.offloads)):
            yield with_pieces(plan, process, i, *step.offloads[:k], *step.offloads[k + 1 :])


@mutant("piece")
def piece_leaves_twice(plan: Plan) -> Iterator[Plan]:
    for process, i, step in leaving(plan):
        for k, piece in enumerate(step.offloads):
            yield with_pieces(plan, process, i, *step.offloads[:k], piece, *step.offloads[k:])


@mutant("piece")
def pieces_out_of_turn(plan: Plan) -> Iterator[Plan]:
    for process, i, step in leaving(plan):
        yield with_pieces(plan, process, i, *reversed(step.offloads))
        for k in range(len(step.offloads) - 1):
            a, b = step.offloads[k : k + 2]
            yield with_pieces(plan, process, i, *step.offloads[:k], b, a, *step.offloads[k + 2 :])


@mutant("piece")
def piece_of_part_of_a_page(plan: Plan) -> Iterator[Plan]:
    for process, i, step in leaving(plan):
        first, second, *rest = step.offloads
        moved = first.start + 4
        yield with_pieces(plan, process, i, change(first, start=moved), change(second, stop=moved), *rest)


@mutant("not-mapped", "not-held")
def pieces_leave_before_the_last_writer(plan: Plan) -> Iterator[Plan]:
    """The group before, whose backward is not the last."""
    for process, i, step in leaving(plan):
        for _, j, other in steps(plan, Run, process=process):
            if j < i and (other.task, other.role, other.node) == (step.task, step.role, step.node):
                yield put(
                    put(plan, process, i, change(step, offloads=())), process, j, change(other, offloads=step.offloads)
                )


@mutant("piece", "not-mapped")
def pieces_leave_beside_another_task(plan: Plan) -> Iterator[Plan]:
    for process, i, step in leaving(plan):
        for _, j, other in steps(plan, Run, process=process):
            if other.task in ("train", "suffix", "grad_norm") and other.window == step.window:
                yield put(
                    put(plan, process, i, change(step, offloads=())), process, j, change(other, offloads=step.offloads)
                )


@mutant("not-mapped")
def gradients_read_in_hbm_behind_their_pieces(plan: Plan) -> Iterator[Plan]:
    for process, _, step in leaving(plan):
        name = step.offloads[0].object
        for _, j, norm in steps(plan, Run, process=process):
            if norm.task == "grad_norm" and norm.role == step.role:
                yield put(plan, process, j, change(norm, reads=(name,), streams=()))


@mutant("not-held")
def pieces_offloaded_again(plan: Plan) -> Iterator[Plan]:
    for process, i, step in leaving(plan):
        yield insert(plan, process, i + 1, Offload(window=step.window, object=step.offloads[0].object))


@mutant("missing-exchange")
def piece_without_its_reduction(plan: Plan) -> Iterator[Plan]:
    """Or with one that ranks do not need."""
    for process, i, step in leaving(plan):
        for k, piece in enumerate(step.offloads):
            other = change(piece, reduce="" if piece.reduce else "all_reduce")
            yield with_pieces(plan, process, i, *step.offloads[:k], other, *step.offloads[k + 1 :])


@mutant("missing-exchange")
def gradients_reduced_again(plan: Plan) -> Iterator[Plan]:
    """Before their pieces leave, each of which is reduced."""
    for process, i, step in leaving(plan):
        if not step.offloads[0].reduce:
            continue
        name = step.offloads[0].object
        nbytes = next(o.bytes for o in plan.summary.objects if o.name == name)
        whole = Exchange(window=step.window, group="dp", op="all_reduce", object=name, nbytes=nbytes)
        yield insert(plan, process, i, whole)


@mutant("host-overlap")
def gradients_over_the_saved_state(plan: Plan) -> Iterator[Plan]:
    """Both are at the host while the backward that reads the one ends the other."""
    places = {p.object: p for p in plan.summary.host_pool.offsets}
    for _, _, step in leaving(plan):
        for saved in (name for name in step.streams if name in places):
            moved = places[step.offloads[0].object].model_copy(update={"offset": places[saved].offset})
            offsets = tuple(moved if p.object == moved.object else p for p in places.values())
            yield summarise(plan, host_pool=plan.summary.host_pool.model_copy(update={"offsets": offsets}))


@mutant("times")
def more_is_hidden_than_leaves(plan: Plan) -> Iterator[Plan]:
    times = plan.summary.times
    for hidden in (0.0, times.hidden_offload_s + 10.0) if times.hidden_offload_s else (0.5,):
        yield summarise(plan, times=times.model_copy(update={"hidden_offload_s": hidden}))
