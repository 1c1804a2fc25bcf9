"""Faults of capacity and of what the summary says about it."""

from __future__ import annotations

from collections.abc import Iterator

from mutants.edit import mutant, steps, summarise, with_object, with_window
from rollplex.ir.plan import Infeasible, Plan
from rollplex.ir.steps import Run, UpdateChunk


@mutant("capacity")
def capacity_one_byte_too_small(plan: Plan) -> Iterator[Plan]:
    if plan.feasible:
        yield summarise(plan, capacity_bytes=plan.summary.peak_hbm_bytes - 1)


@mutant("host-capacity")
def pinned_pool_one_byte_too_small(plan: Plan) -> Iterator[Plan]:
    if plan.feasible and plan.summary.peak_host_bytes:
        yield summarise(plan, host_capacity_bytes=plan.summary.peak_host_bytes - 1)


@mutant("node-memory")
def node_that_does_not_add_up(plan: Plan) -> Iterator[Plan]:
    node = plan.summary.node
    for field in ("capacity_bytes", "pinned_bytes", "process_bytes", "batch_bytes"):
        yield summarise(plan, node=node.model_copy(update={field: getattr(node, field) + 1}))
    yield summarise(plan, node=node.model_copy(update={"controller": not node.controller}))
    for pool, gpus in node.gpus.items():
        yield summarise(plan, node=node.model_copy(update={"gpus": {**node.gpus, pool: gpus + 1}}))


@mutant("node-memory")
def batch_of_another_step(plan: Plan) -> Iterator[Plan]:
    yield summarise(plan, batch_bytes=plan.summary.batch_bytes - 1)


@mutant("window-bytes", "host-bytes")
def object_one_byte_larger(plan: Plan) -> Iterator[Plan]:
    """An object grows, its windows do not."""
    for o in plan.summary.objects:
        if set(o.residency.values()) & {"hbm", "host"}:
            yield with_object(plan, o.name, bytes=o.bytes + 1)


@mutant("window-bytes")
def window_understated(plan: Plan) -> Iterator[Plan]:
    for w in plan.summary.windows:
        for name, nbytes in w.by_object.items():
            fewer = {**w.by_object, name: nbytes - 1}
            yield with_window(plan, w.name, by_object=fewer, hbm_bytes=w.hbm_bytes - 1)


@mutant("window-bytes")
def object_left_out_of_a_window(plan: Plan) -> Iterator[Plan]:
    for w in plan.summary.windows:
        for name, nbytes in w.by_object.items():
            rest = {n: b for n, b in w.by_object.items() if n != name}
            yield with_window(plan, w.name, by_object=rest, hbm_bytes=w.hbm_bytes - nbytes)


@mutant("window-bytes")
def window_overstated(plan: Plan) -> Iterator[Plan]:
    for w in plan.summary.windows:
        for o in plan.summary.objects:
            if o.name not in w.by_object:
                more = {**w.by_object, o.name: o.bytes}
                yield with_window(plan, w.name, by_object=more, hbm_bytes=w.hbm_bytes + o.bytes)


@mutant("window-bytes")
def window_of_another_sum(plan: Plan) -> Iterator[Plan]:
    for w in plan.summary.windows:
        yield with_window(plan, w.name, hbm_bytes=w.hbm_bytes - 1)


@mutant("host-bytes")
def host_understated(plan: Plan) -> Iterator[Plan]:
    for w in plan.summary.windows:
        yield with_window(plan, w.name, host_bytes=w.host_bytes - 1)


@mutant("peak")
def wrong_peak(plan: Plan) -> Iterator[Plan]:
    yield summarise(plan, peak_hbm_bytes=plan.summary.peak_hbm_bytes - 1)
    yield summarise(plan, peak_host_bytes=plan.summary.peak_host_bytes + 1)


@mutant("peak")
def wrong_peak_window(plan: Plan) -> Iterator[Plan]:
    for w in plan.summary.windows:
        if w.hbm_bytes < plan.summary.peak_hbm_bytes:
            yield summarise(plan, peak_window=w.name)


@mutant("residency-table")
def wrong_place_in_the_table(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        for window, place in o.residency.items():
            for other in sorted({"hbm", "host", "-"} - {place, "-" if place == "dropped" else place}):
                yield with_object(plan, o.name, residency={**o.residency, window: other})


@mutant("residency-table")
def window_left_out_of_the_table(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        for window in o.residency:
            yield with_object(plan, o.name, residency={w: p for w, p in o.residency.items() if w != window})


@mutant("uses-table")
def use_not_planned(plan: Plan) -> Iterator[Plan]:
    """Places follow from uses: only what is always in HBM may be used in any window."""
    used = {(n, s.window) for _, _, s in steps(plan, Run, UpdateChunk) for n in (*s.reads, *s.writes, *s.streams)}
    for o in plan.summary.objects:
        for window in o.consumed if set(o.residency.values()) != {"hbm"} else ():
            if (o.name, window) in used and window != o.produced:
                yield with_object(plan, o.name, consumed=tuple(w for w in o.consumed if w != window))


@mutant("uses-table")
def produced_elsewhere(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        made = any(o.name in s.writes or o.name in s.streams for _, _, s in steps(plan, Run, UpdateChunk))
        for w in plan.summary.windows if made and o.produced != "start" else ():
            if w.name != o.produced:
                yield with_object(plan, o.name, produced=w.name)


@mutant("feasible")
def verdict_turned(plan: Plan) -> Iterator[Plan]:
    first = plan.summary.windows[0].name
    why = Infeasible(window=first, shortfall_bytes=1, objects=(), remedies=())
    yield plan.model_copy(update={"feasible": not plan.feasible, "infeasible": why if plan.feasible else None})


@mutant("infeasible")
def explanation_of_a_plan_that_fits(plan: Plan) -> Iterator[Plan]:
    if plan.feasible:
        first = plan.summary.windows[0].name
        why = Infeasible(window=first, shortfall_bytes=1, objects=(), remedies=())
        yield plan.model_copy(update={"infeasible": why})


@mutant("infeasible")
def wrong_explanation(plan: Plan) -> Iterator[Plan]:
    if why := plan.infeasible:
        others = [w.name for w in plan.summary.windows if w.name != why.window]
        yield from (_explained(plan, why, window=name) for name in others)
        yield _explained(plan, why, shortfall_bytes=why.shortfall_bytes - 1)
        yield _explained(plan, why, objects=why.objects[1:])
        yield plan.model_copy(update={"infeasible": None})


def _explained(plan: Plan, why: Infeasible, **fields: object) -> Plan:
    return plan.model_copy(update={"infeasible": why.model_copy(update=fields)})
