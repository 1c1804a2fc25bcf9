"""Places of the checker that no fault of mutants/ reaches: a row each, told with its own words.

test_checker.py holds that every rule is broken by some fault; a rule may be told in several places, and these are those
that are left when all mutants of all its plans have been refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mutants.edit import change, insert, objects, place, steps, summarise, with_object
from mutants.plans import compiled

from rollplex.ir.checker import check_plan
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run, UpdateChunk

Edit = Callable[[Plan], Plan]


def process_of(plan: Plan, **fields: Any) -> Plan:
    """The training processes, changed."""
    kind = plan.processes["train"].model_copy(update=fields)
    return plan.model_copy(update={"processes": {**plan.processes, "train": kind}})


def argument(op: str, at: int, name: str) -> Edit:
    """The first call of an op takes another value as its argument `at`."""

    def edit(plan: Plan) -> Plan:
        i, record = next((i, r) for i, r in enumerate(plan.graph) if r.op == op)
        args = list(record.args)
        args[at] = {"ref": name}
        graph = list(plan.graph)
        graph[i] = record.model_copy(update={"args": tuple(args)})
        return plan.model_copy(update={"graph": tuple(graph)})

    return edit


def another_model(plan: Plan) -> Plan:
    """The reference is of another model than the policy whose base it reads."""
    roles = {**plan.job["roles"], "reference": {**plan.job["roles"]["reference"], "model": "Qwen2.5-VL-72B"}}
    return plan.model_copy(update={"job": {**plan.job, "roles": roles}})


def moments_leave(plan: Plan) -> Plan:
    """The moments leave HBM in the first window."""
    moments = objects(plan)["actor.moments"]
    return with_object(plan, "actor.moments", residency={**moments.residency, next(iter(moments.residency)): "host"})


def touches_carried(plan: Plan) -> Plan:
    """Another step of the rollout engine takes up what unfinished responses left."""
    _, i, generate = next(steps(plan, Run, process="rollout"))
    return insert(plan, "rollout", i + 1, change(generate, task="load", inputs=(), outputs=(), writes=()))


def kept_twice(plan: Plan) -> Plan:
    """What a turn leaves to the next is named once more."""
    says = plan.summary.trajectories
    assert says is not None
    return summarise(plan, trajectories=says.model_copy(update={"kept": (*says.kept, says.kept[0])}))


def updated_elsewhere(plan: Plan) -> Plan:
    """The rollout engine updates the first chunk too, on nothing."""
    chunk = change(next(s for _, _, s in steps(plan, UpdateChunk)), reads=(), writes=(), streams=())
    return insert(plan, "rollout", place(plan, "rollout", "published"), chunk)


PLACES: dict[str, tuple[str, Edit, str]] = {
    "a copy of nobody": (
        "rollplex",
        lambda plan: process_of(plan, distributed_optimizer=("nobody",)),
        "it repeats nobody, which the job does not have",
    ),
    "a base of another model": ("lora", another_model, "reference reads base weights that are not its own model's"),
    "a state that may not leave": ("fsdp", moments_leave, "leaves HBM, the job's offload_optimizer is false"),
    "a suffix of prompts": ("rollplex", argument("rx.suffix", 2, "prompts"), "it takes no responses of this step"),
    "a step beside decode": ("partial", touches_carried, "which only decode goes on with"),
    "kept twice": ("turns", kept_twice, "what the engine keeps is named twice"),
    "an update elsewhere": ("rollplex", updated_elsewhere, "train updates actor too"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place_is_told(name: str) -> None:
    """The plan passes as it is compiled, and its edit is refused with the words of that place."""
    plan_name, edit, words = PLACES[name]
    plan = compiled(plan_name)
    assert check_plan(plan) == ()
    assert any(words in str(v) for v in check_plan(edit(plan))), [str(v) for v in check_plan(edit(plan))][:5]
