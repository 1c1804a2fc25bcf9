"""Row 29 of the public reports: engines that sleep, wake and generate in the wrong order, as plans by hand.

    sleep at level 2 (weights discarded), then generate           garbage        dropped-needed
    wake the weights' pages without their contents, generate      garbage        not-produced
    sleep at level 1, wake the weights, generate without KV       illegal access not-mapped
    wake the KV cache while the trainer still holds its state     out of memory  capacity
    publish when only a part of the weights has been written      a mixture      publish-order

The plans are the tiny ones of tinyplan.py; in `apart` the rollout engine has a copy of the weights of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cases.judge import judge
from cases.table import CASES
from mutants.edit import insert, objects, place, put, steps, summarise
from tinyplan import tiny_plan

from rollplex.ir.checker import check_plan
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Drop, Fetch, Map, Offload, Publish, Run, Unmap

WEIGHTS, KV = "rollout.weights", "rollout.kv"


def generates(plan: Plan) -> int:
    """Where the rollout engine generates."""
    return next(i for _, i, s in steps(plan, Run, process="rollout") if s.task == "generate")


def slept_at_level_2(plan: Plan) -> Plan:
    return insert(plan, "rollout", generates(plan), Drop(window="P1 decode", object=WEIGHTS))


def woken_without_contents(plan: Plan) -> Plan:
    window, at = "P1 decode", generates(plan)
    return insert(plan, "rollout", at, Unmap(window=window, object=WEIGHTS), Map(window=window, object=WEIGHTS))


def woken_without_kv(plan: Plan) -> Plan:
    at = next(i for _, i, s in steps(plan, Map, process="rollout") if s.object == KV)
    return put(plan, "rollout", at)


def woken_beside_the_trainer(plan: Plan) -> Plan:
    """The trainer's activations fill the GPU; here the KV cache is mapped again before they are gone."""
    at = place(plan, "rollout", "theta-quiet")
    window = "P2 train-actor"
    back = (Map(window=window, object=KV), Unmap(window=window, object=KV))
    return insert(plan, "rollout", at, *back)


def published_half_way(plan: Plan) -> Plan:
    first = next(i for _, i, s in steps(plan, process="train") if s.kind == "update_chunk")
    published = next((i, s) for _, i, s in steps(plan, Publish, process="train"))
    return insert(
        put(plan, "train", published[0]), "train", first + 1, published[1].model_copy(update={"window": "P3 update"})
    )


FAULTS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "discarded, then used": (slept_at_level_2, "dropped-needed"),
    "woken without contents": (woken_without_contents, "not-produced"),
    "woken without KV": (woken_without_kv, "not-mapped"),
    "woken beside the trainer": (woken_beside_the_trainer, "capacity"),
    "published half-way": (published_half_way, "publish-order"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_transition_in_the_wrong_order_is_refused(fault: str) -> None:
    """The checker names the rule; the plan without the fault has no violation."""
    make, rule = FAULTS[fault]
    sound = tiny_plan("apart")
    assert not check_plan(sound)
    assert rule in {v.kind for v in check_plan(make(sound))}


def test_kv_that_wakes_before_the_weights_are_written_does_not_fit() -> None:
    """Row 14: its plan fits; with the KV cache mapped beside the weights, before they are written, it is over."""
    plan = judge(next(c for c in CASES if c.row == 14)).plan
    assert plan is not None
    assert plan.feasible
    assert not check_plan(plan)
    at = 1 + next(i for _, i, s in steps(plan, Map, Fetch, process="rollout") if s.window == "P3 publish")
    window = "P3 publish"
    at_once = insert(plan, "rollout", at, Map(window=window, object=KV), Unmap(window=window, object=KV))
    assert "capacity" in {v.kind for v in check_plan(at_once)}


def test_a_whole_sleep_and_wake_is_legal_where_the_host_has_room() -> None:
    """Level 1: offloaded, fetched, used. The backup at the host is counted (row 24): the tiny pool lacks it."""
    plan, window = tiny_plan("apart"), "P1 decode"
    slept = insert(
        plan, "rollout", generates(plan), Offload(window=window, object=WEIGHTS), Fetch(window=window, object=WEIGHTS)
    )
    assert {v.kind for v in check_plan(slept)} == {"host-capacity"}
    backup = objects(plan)[WEIGHTS].bytes
    host, cluster = plan.summary.host_capacity_bytes + backup, plan.job["cluster"]
    whole = host * cluster["gpus_per_node"]
    roomy = {**plan.job, "cluster": {**cluster, "host_memory_gb": whole / 10**9}}
    node = plan.summary.node.model_copy(update={"capacity_bytes": whole})
    assert not check_plan(summarise(slept, host_capacity_bytes=host, node=node).model_copy(update={"job": roomy}))
