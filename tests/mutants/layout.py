"""Faults of the layout: cases, buffer, exchange and placement that do not add up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from mutants.edit import change, mutant, put, steps, with_layout, with_object
from rollplex.ir.plan import Plan
from rollplex.ir.planned_layout import LayoutClass
from rollplex.ir.steps import Exchange, Rebuild


def with_class(plan: Plan, name: str, **fields: Any) -> Plan:
    """The plan with other fields in one weight class."""
    classes = plan.summary.layout.classes
    return with_layout(plan, classes=tuple(c.model_copy(update=fields) if c.name == name else c for c in classes))


def classes(plan: Plan) -> tuple[LayoutClass, ...]:
    return plan.summary.layout.classes


@mutant("layout-cases")
def parameter_of_another_case(plan: Plan) -> Iterator[Plan]:
    """One parameter is told in the wrong case: the sum is still right."""
    told = plan.summary.layout.cases
    for a, b in (("1", "2"), ("2", "3"), ("3", "1")):
        more, fewer = (told[k].model_copy(update={"params": told[k].params + d}) for k, d in ((a, 1), (b, -1)))
        yield with_layout(plan, cases={**told, a: more, b: fewer})


@mutant("layout-cases")
def parameter_that_the_model_lacks(plan: Plan) -> Iterator[Plan]:
    """Classes and cases agree, and have more than the model."""
    told = plan.summary.layout.cases
    for c in classes(plan):
        one = told[str(c.case)]
        itemsize = one.bytes // max(one.params, 1)
        more = one.model_copy(update={"params": one.params + 1, "bytes": one.bytes + itemsize})
        yield with_layout(with_class(plan, c.name, params=c.params + 1), cases={**told, str(c.case): more})


@mutant("layout-cases")
def bytes_of_another_case(plan: Plan) -> Iterator[Plan]:
    told = plan.summary.layout.cases
    for k, c in told.items():
        yield with_layout(plan, cases={**told, k: c.model_copy(update={"bytes": c.bytes + 1})})


@mutant("layout-cases")
def unknown_model(plan: Plan) -> Iterator[Plan]:
    if classes(plan):
        yield plan.model_copy(update={"job": {**plan.job, "model": {"name": "Qwen9-VL-1B"}}})


@mutant("layout-cases")
def tensor_left_out(plan: Plan) -> Iterator[Plan]:
    listed = plan.summary.layout.tensors
    for i in {next((i for i, t in enumerate(listed) if t.case == k), None) for k in (2, 3)} - {None}:
        assert i is not None
        yield with_layout(plan, tensors=(*listed[:i], *listed[i + 1 :]))
    if listed:
        yield with_layout(plan, tensors=tuple(t for t in listed if t.case != 1))


@mutant("layout-view")
def class_of_another_case(plan: Plan) -> Iterator[Plan]:
    for c in classes(plan):
        yield with_class(plan, c.name, case=c.case % 3 + 1)


@mutant("layout-view")
def reindexed_in_the_stock_order(plan: Plan) -> Iterator[Plan]:
    for c in classes(plan):
        if c.case == 1 and plan.summary.layout.order == "stock":
            yield with_class(plan, c.name, view="reindex")


@mutant("layout-buffer")
def rebuilt_without_a_buffer(plan: Plan) -> Iterator[Plan]:
    """A class of case 3 has no buffer; the total agrees."""
    for c in classes(plan):
        if c.case == 3 and c.buffer_bytes:
            less = plan.summary.layout.case3_buffer_bytes - c.buffer_bytes
            yield with_layout(with_class(plan, c.name, buffer_bytes=0), case3_buffer_bytes=less)


@mutant("layout-buffer", "layout-cases")
def buffer_of_another_size(plan: Plan) -> Iterator[Plan]:
    for delta in (-1, 1):
        yield with_layout(plan, case3_buffer_bytes=plan.summary.layout.case3_buffer_bytes + delta)


@mutant("layout-buffer")
def buffer_object_too_small(plan: Plan) -> Iterator[Plan]:
    told = plan.summary.layout.case3_buffer_bytes
    for name in {s.object for _, _, s in steps(plan, Rebuild)}:
        yield with_object(plan, name, bytes=told - 1)
        yield with_object(plan, name, bytes=told + (2 << 20))


@mutant("layout-exchange")
def class_receives_another_amount(plan: Plan) -> Iterator[Plan]:
    for c in classes(plan):
        yield with_class(plan, c.name, receives_bytes=c.receives_bytes + 1)


@mutant("layout-exchange")
def class_receives_more_than_its_shard(plan: Plan) -> Iterator[Plan]:
    """The sum is kept."""
    told = classes(plan)
    for a, b in pairwise(told):
        if b.receives_bytes:
            more = a.shard_bytes + 1
            moved = with_class(plan, a.name, receives_bytes=more)
            yield with_class(moved, b.name, receives_bytes=b.receives_bytes + a.receives_bytes - more)


@mutant("layout-exchange")
def class_gathered_over_other_gpus(plan: Plan) -> Iterator[Plan]:
    """Of a shard that lies on q GPUs one is left out, or one that has nothing of it is asked."""
    for c in (c for c in classes(plan) if c.receives_bytes):
        yield with_class(plan, c.name, group=1)
        if c.name != "qkv":  # whose K and V may repeat on more ranks
            yield with_class(plan, c.name, group=2 * c.group)


@mutant("layout-exchange")
def less_is_gathered_than_a_rank_lacks(plan: Plan) -> Iterator[Plan]:
    """Class, sum and step agree, and a byte of the rollout shard stays as it was."""
    told = plan.summary.layout.exchange_bytes_per_gpu - 1
    for c in (c for c in classes(plan) if c.receives_bytes):
        fewer = with_class(plan, c.name, receives_bytes=c.receives_bytes - 1)
        for process, i, step in steps(plan, Exchange):
            if step.group == "q":
                yield with_layout(put(fewer, process, i, change(step, nbytes=told)), exchange_bytes_per_gpu=told)


@mutant("layout-exchange")
def more_from_other_nodes_than_there_is(plan: Plan) -> Iterator[Plan]:
    told = plan.summary.layout
    yield with_layout(plan, between_nodes_bytes=told.exchange_bytes_per_gpu + told.tower_bytes + 1)


@mutant("times")
def publication_in_no_time(plan: Plan) -> Iterator[Plan]:
    """The exchange takes longer than the window that it is in."""
    yield with_layout(plan, exchange_s=plan.summary.layout.exchange_s + 1.0)


@mutant("layout-placement")
def gpu_left_out(plan: Plan) -> Iterator[Plan]:
    placed = plan.summary.layout.placement
    for name, gpus in placed.items():
        yield with_layout(plan, placement={**placed, name: (*gpus[:-1], max(gpus) + 100)})
        if len(plan.summary.pools) == 1:
            yield with_layout(plan, placement={k: v for k, v in placed.items() if k != name})


@mutant("layout-placement")
def last_rank_nowhere(plan: Plan) -> Iterator[Plan]:
    """Every engine lacks its last rank: GPUs, ranks and q still agree."""
    yield with_layout(plan, placement={name: gpus[:-1] for name, gpus in plan.summary.layout.placement.items()})


@mutant("layout-placement")
def engines_on_other_gpus(plan: Plan) -> Iterator[Plan]:
    """All engines on one engine's GPUs; or engine 0 on the first GPUs, engine 1 on the next, away from their slabs."""
    placed, width = plan.summary.layout.placement, len(next(iter(plan.summary.layout.placement.values())))
    if len(placed) > 1:
        yield with_layout(plan, placement=dict.fromkeys(placed, next(iter(placed.values()))))
    if len(placed) > 1 and width > 1 and plan.summary.layout.q:
        runs = {name: tuple(range(i * width, (i + 1) * width)) for i, name in enumerate(placed)}
        yield with_layout(plan, placement=runs)
