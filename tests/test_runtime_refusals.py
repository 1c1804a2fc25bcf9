"""A plan that lies is refused by arenas and executor at run time, with the step and the object; it never hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import children
from runtime_threads import InThreads
from runtime_tiny import luck, tight_plan

from rollplex.ir.errors import EngineError, OutOfMemory, PlanError, RollplexError
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Barrier, Drop, Fetch, Map, Run, Signal, Step, Unmap, UpdateChunk, Wait
from rollplex.runtime.run import execute_plan

pytestmark = pytest.mark.processes

Program = tuple[Step, ...]


def with_program(plan: Plan, kind: str, change: Callable[[list[Step]], None]) -> Plan:
    steps = list(plan.programs[kind])
    change(steps)
    return plan.model_copy(update={"programs": {**plan.programs, kind: tuple(steps)}})


def with_summary(plan: Plan, **changes: Any) -> Plan:
    return plan.model_copy(update={"summary": plan.summary.model_copy(update=changes)})


def at_place_of(name: str, other: str) -> Plan:
    """The plan with an object's place in the pinned pool where another's begins."""
    pool = tight.summary.host_pool
    at = {p.object: p.offset for p in pool.offsets}
    moved = tuple(p.model_copy(update={"offset": at[other]}) if p.object == name else p for p in pool.offsets)
    return with_summary(tight, host_pool=pool.model_copy(update={"offsets": moved}))


def with_smaller_place(name: str) -> Plan:
    """The plan with a page less for an object in the pinned pool."""
    pool = tight.summary.host_pool
    places = (p.model_copy(update={"bytes": p.bytes - 4096}) if p.object == name else p for p in pool.offsets)
    return with_summary(tight, host_pool=pool.model_copy(update={"offsets": tuple(places)}))


def drop(kind: type[Step], **fields: str) -> Callable[[list[Step]], None]:
    """Leave out the first step of a kind with these fields."""

    def change(steps: list[Step]) -> None:
        del steps[_find(steps, kind, **fields)]

    return change


def _find(steps: list[Step], kind: type[Step], **fields: str) -> int:
    wanted = fields.items()
    return next(
        i for i, s in enumerate(steps) if isinstance(s, kind) and wanted <= s.model_dump(include=set(fields)).items()
    )


def swap_barriers(steps: list[Step]) -> None:
    first, second = (i for i, s in enumerate(steps) if isinstance(s, Barrier) and s.name != "published")
    steps[first], steps[second] = steps[second], steps[first]


def unmap_early(steps: list[Step]) -> None:
    """The actor's boundary goes before training reads it."""
    at = _find(steps, Unmap, object="actor.boundary")
    steps.insert(_find(steps, Map, object="train.activations"), steps.pop(at))


def fetch_to_map(steps: list[Step]) -> None:
    at = _find(steps, Fetch, object=RETURNS)
    steps[at] = Map(window=steps[at].window, object=RETURNS)


def second_map(steps: list[Step]) -> None:
    at = _find(steps, Map, object="actor.gradients")
    steps.insert(at, steps[at])


def unmap_twice(steps: list[Step]) -> None:
    at = _find(steps, Unmap, object="actor.gradients")
    steps.insert(at, steps[at])


def drop_moments(steps: list[Step]) -> None:
    at = _find(steps, Unmap, object="actor.gradients")
    steps.insert(at, Drop(window=steps[at].window, object="actor.moments"))


def unmap_snapshot(steps: list[Step]) -> None:
    at = _find(steps, Unmap, object="actor.boundary")
    steps.insert(at, Unmap(window=steps[at].window, object="actor.snapshot"))


def chunk_twice(steps: list[Step]) -> None:
    at = _find(steps, UpdateChunk)
    steps[at + 1] = steps[at]


def wrong_task(steps: list[Step]) -> None:
    at = _find(steps, Run, task="prefix")
    steps[at] = steps[at].model_copy(update={"task": "generate"})


tight = tight_plan()
RETURNS = next(s.object for s in tight.programs["train"] if isinstance(s, Fetch))
peak, host_peak = tight.summary.peak_hbm_bytes, tight.summary.peak_host_bytes

CASES: dict[str, tuple[Plan, type[RollplexError], str]] = {
    "missing fetch": (
        with_program(tight, "train", drop(Fetch, object=RETURNS)), EngineError,
        rf"train 0, window P. .*: run (prefix|suffix) reference mb 0 uses {RETURNS}, which is not mapped",
    ),
    "map instead of fetch": (
        with_program(tight, "train", fetch_to_map), EngineError,
        rf"run (prefix|suffix) reference mb 0 reads {RETURNS}, whose pages hold nothing yet",
    ),
    "early unmap": (
        with_program(tight, "train", unmap_early), EngineError,
        r"run train actor mb 0 uses actor.boundary, which is not mapped",
    ),
    "missing map": (
        with_program(tight, "train", drop(Map, object="actor.gradients")), EngineError,
        r"run train actor mb 0 uses actor.gradients, which is not mapped",
    ),
    "second map": (
        with_program(tight, "train", second_map), PlanError,
        r"train 0: P2 train-actor: map actor.gradients: actor.gradients is mapped already",
    ),
    "second unmap": (
        with_program(tight, "train", unmap_twice), PlanError,
        r"unmap actor.gradients: actor.gradients is not mapped",
    ),
    "missing unmap": (
        with_program(tight, "rollout", drop(Unmap, object="rollout.kv")), RollplexError,
        r"(?s)asks for .* too many.* rollout.kv  \(rollout 0\)|map rollout.kv: rollout.kv is mapped already",
    ),
    "a drop of permanent state": (
        with_program(tight, "train", drop_moments), PlanError,
        r"drop actor.moments: actor.moments is permanent",
    ),
    "an unmap of pages that rollout reads": (
        with_program(tight, "train", unmap_snapshot), PlanError,
        r"unmap actor.snapshot: actor.snapshot is still mapped by rollout 0",
    ),
    "missing wait": (
        with_program(tight, "train", drop(Wait, event="prompts")), EngineError,
        r"run prefix reference mb 0 takes prompts, which this process neither made nor received",
    ),
    "missing chunk": (
        with_program(tight, "train", drop(UpdateChunk)), EngineError,
        r"actor.snapshot is published, but from element 0 of \d+ on it was not updated once",
    ),
    "a chunk twice": (
        with_program(tight, "train", chunk_twice), EngineError,
        r"actor.snapshot is published, but from element \d+ of \d+ on it was not updated once",
    ),
    "swapped barriers": (
        with_program(tight, "train", swap_barriers), EngineError,
        r"train 0: arrived at barrier theta-quiet, but rollout-complete comes next",
    ),
    "one byte too few on the device": (
        with_summary(tight, capacity_bytes=peak - 1), OutOfMemory,
        r"(?s)device 0: map .*, window .*: .* are live: .* \(1 bytes\) too many\n .* actor.snapshot  \(train 0\)",
    ),
    "saved state over the moments": (
        at_place_of("actor.prefix_saved", "actor.moments"), PlanError,
        r"run prefix actor mb 0: actor.prefix_saved goes to bytes \d+ to \d+, and actor.moments \(train 0\) is there",
    ),
    "two states at one place": (
        at_place_of("actor.moments", "actor.master"), PlanError,
        r"host: allocate pinned: actor.moments goes to bytes \d+ to \d+, and actor.master \(train 0\) is there",
    ),
    "a place too small": (
        with_smaller_place("actor.prefix_saved"), PlanError,
        r"run prefix actor mb 0: actor.prefix_saved has no slot of its size in the pinned pool",
    ),
    "one byte too few in the pool": (
        with_summary(tight, host_capacity_bytes=host_peak - 1), OutOfMemory,
        r"host: allocate pinned: .* \(1 bytes\) too many",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_plan_that_lies_is_refused_where_it_lies(name: str) -> None:
    plan, error, message = CASES[name]
    with pytest.raises(error, match=message):
        run_twice(plan)


def test_the_plan_itself_is_not_refused() -> None:
    run_twice(tight)


def run_twice(plan: Plan) -> None:
    run = InThreads(plan, {"reward": luck})
    run.step(0)
    run.step(1)
    run.close()


# ---- the same over real processes: what a refusal there looks like, and waits that nobody would end

OVER_PROCESSES: dict[str, tuple[Plan, type[RollplexError], str]] = {
    "one byte too few on the device": (
        with_summary(tight, capacity_bytes=peak - 1), OutOfMemory,
        r"(train|rollout) 0 \(pid \d+\) in step `map .*`, window .*, iteration 0: device 0: map .* too many",
    ),
    "missing signal": (
        with_program(tight, "controller", drop(Signal, event="prompts")), EngineError,
        r"no process can go on: controller 0 in `wait rollout`; rollout 0 in `wait prompts`; train 0 in `wait prompts`",
    ),
    "a bug of ours": (
        with_program(tight, "train", wrong_task), EngineError,
        r"train 0 .* in step `run generate reference mb 0`.*: AssertionError: generate is no task of a training rank\n"
        r"    try: this is a bug of Rollplex: report it with .*/logs/train-0.log",
    ),
    "missing barrier": (
        with_program(tight, "rollout", drop(Barrier, name="published")), EngineError,
        r"no process can go on: controller 0 in `barrier published`; train 0 in `barrier published`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OVER_PROCESSES)
def test_over_processes_a_refusal_says_where_and_nothing_hangs(name: str, tmp_path: Path) -> None:
    plan, error, message = OVER_PROCESSES[name]
    with pytest.raises(error, match=message):
        execute_plan(plan, hosts={"reward": luck}, out_dir=tmp_path / "run")
    assert children() == []
