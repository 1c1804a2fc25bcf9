"""Who holds what when, looked up on the device at every step of the trainer: as planned, and as the paper says.

                   P1 prefix-ref   P1 prefix-actor   P1 decode   P2 score-ref   P2 train-actor   P3
rollout KV         hbm             hbm               hbm         released
reference          weights         left              left        weights        left             left
gradients                                                                       hbm              host, chunk by chunk
moments            host            host              host        host           host             host, chunk by chunk
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest
import torch
from runtime_threads import TRAIN, InThreads
from runtime_tiny import luck, tight_plan

from rollplex.backends.memory.pinned import PinnedPool
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run, Step, UpdateChunk
from rollplex.runtime.protocol import ProcessId

torch.set_num_threads(1)
STEPS = 3


class Watched:
    """Three steps of a plan in threads; `live` is what the device held at each of the trainer's tasks, by window."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.live: dict[str, list[set[str]]] = defaultdict(list)
        self.slots: set[int] = set()
        self.pools: list[PinnedPool] = []
        self.saved: dict[str, list[bool]] = defaultdict(list)
        self.run = InThreads(plan, {"reward": luck}, self._look)
        self.opened = self.run.host.total_bytes
        for step in range(STEPS):
            self.run.step(step)
        self.closed = self.run.host.total_bytes
        self.run.close()

    def _look(self, process: ProcessId, step: Step) -> None:
        if process != TRAIN or not isinstance(step, Run | UpdateChunk):
            return
        self.live[step.window].append({entry.object for entry in self.run.device.live()})
        train = self.run.train.objects
        self.pools.append(train.pool)
        if isinstance(step, Run) and step.task in ("prefix", "prefix_backward") and step.role == "actor":
            self.saved[step.task].append("actor.prefix_saved" in step.streams)
            if step.task == "prefix_backward":  # before the first prefix nothing is there
                master = train.slot("actor.master", torch.uint8).data_ptr()
                self.slots.add(train.slot("actor.prefix_saved", torch.uint8).data_ptr() - master)

    def ever(self, name: str) -> set[str]:
        """Windows in which the device held an object at some task."""
        return {window for window, seen in self.live.items() if any(name in live for live in seen)}


@cache
def tight() -> Watched:
    return Watched(tight_plan())


def test_rollout_kv_is_gone_before_the_first_response_is_scored() -> None:
    assert tight().ever("rollout.kv") == tight().ever("rollout.runtime") == {"P1 prefix-reference", "P1 prefix-actor"}


def test_reference_weights_are_there_around_the_two_windows_that_read_them() -> None:
    """What the plan moves out in between is really gone: of weights and tower, what does not fit beside training."""
    plan, found = tight().plan, tight()
    for name in ("reference.weights", "reference.vision"):
        planned = {w for w, place in plan.object(name).residency.items() if place == "hbm"}
        assert found.ever(name) == planned & found.live.keys()
    assert "P2 train-actor" not in found.ever("reference.weights") & found.ever("reference.vision")
    assert {"P1 prefix-reference", "P2 score-reference"} <= found.ever("reference.weights")


def test_permanent_state_comes_through_the_workspace_and_never_as_a_whole() -> None:
    planned = {o.name: o for o in tight().plan.summary.objects if o.class_ == "permanent"}
    streamed = [name for name, o in planned.items() if set(o.residency.values()) == {"host"}]
    assert "actor.moments" in streamed
    for name in streamed:
        assert tight().ever(name) == set()
    assert tight().ever("optimizer.workspace") == {"P3 update"}


def test_gradients_leave_before_the_update_where_the_plan_has_them_at_the_host() -> None:
    place = tight().plan.object("actor.gradients").residency["P3 update"]
    assert tight().ever("actor.gradients") == {"P2 train-actor"} | ({"P3 update"} if place == "hbm" else set())


def test_the_pinned_pool_is_allocated_once_and_prefixes_go_to_the_same_slots() -> None:
    """Three steps, one pool, one address, which is the plan's; what is saved streams out in the prefix and back in its
    backward.
    """
    found = tight()
    assert len({id(pool) for pool in found.pools}) == 1
    at = {p.object: p.offset for p in found.plan.summary.host_pool.offsets}
    assert found.slots == {at["actor.prefix_saved"] - at["actor.master"]}
    assert found.opened == found.closed > 0
    assert found.saved["prefix"] == found.saved["prefix_backward"] == [True] * STEPS * 2


@pytest.mark.parametrize("name", ["rollout.kv", "reference.weights", "actor.prefix_saved"])
def test_the_plan_at_hand_has_these_mechanisms_at_work(name: str) -> None:
    places = set(tight().plan.object(name).residency.values())
    assert places != {"hbm"}
