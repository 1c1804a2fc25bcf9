"""The three barriers: whatever order the processes come in, all pass together, and nobody passes twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.ir.errors import EngineError
from rollplex.ir.plan import BARRIERS
from rollplex.ir.steps import Barrier, Signal, Wait
from rollplex.runtime.barriers import Barriers, Events, barrier_order
from rollplex.runtime.protocol import CONTROLLER, ProcessId

TRAIN, ROLLOUT = ProcessId("train", 0), ProcessId("rollout", 0)
ALL = (CONTROLLER, TRAIN, ROLLOUT)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 3))
def test_every_interleaving_releases_each_barrier_once_with_everyone_at_it(
    data: st.DataObject, ranks: int, iterations: int
) -> None:
    processes = [CONTROLLER, *(ProcessId("train", rank) for rank in range(ranks))]
    barriers = Barriers(processes, BARRIERS)
    for _ in range(iterations):
        barriers.begin()
        passed = []
        for name in BARRIERS:
            waiting = list(processes)
            while waiting:
                who = data.draw(st.sampled_from(waiting))
                waiting.remove(who)
                assert barriers.arrive(who, name) is (not waiting)
                if waiting:
                    assert set(barriers.missing) == set(waiting)
                else:
                    passed.append(name)
        assert tuple(passed) == BARRIERS
        assert barriers.expected == ""


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ALL), st.sampled_from([*BARRIERS, "lunch"])), max_size=15))
def test_any_sequence_of_arrivals_is_obeyed_or_refused(arrivals: list[tuple[ProcessId, str]]) -> None:
    barriers = Barriers(ALL, BARRIERS)
    counts = dict.fromkeys(ALL, 0)
    for who, name in arrivals:
        legal = name == barriers.expected and counts[who] == min(counts.values())
        if not legal:
            with pytest.raises(EngineError):
                barriers.arrive(who, name)
            continue
        barriers.arrive(who, name)
        counts[who] += 1
        assert max(counts.values()) - min(counts.values()) <= 1


def test_a_barrier_out_of_order_names_the_process_and_both_barriers() -> None:
    barriers = Barriers(ALL, BARRIERS)
    with pytest.raises(EngineError, match="train 0: arrived at barrier published, but rollout-complete comes next"):
        barriers.arrive(TRAIN, "published")


def test_arriving_twice_is_refused() -> None:
    barriers = Barriers(ALL, BARRIERS)
    barriers.arrive(TRAIN, "rollout-complete")
    with pytest.raises(EngineError, match="train 0: arrived twice at barrier rollout-complete"):
        barriers.arrive(TRAIN, "rollout-complete")


def test_an_event_reaches_those_who_wait_for_it_and_comes_once_an_iteration() -> None:
    programs = {
        CONTROLLER: (Signal(window="w", event="prompts"),),
        TRAIN: (Wait(window="w", event="prompts"), Wait(window="w", event="rollout")),
        ROLLOUT: (
            Wait(window="w", event="prompts"),
            Signal(window="w", event="rollout"),
            Barrier(window="w", name="rollout-complete"),
        ),
    }
    events = Events(programs)
    assert events.signal(CONTROLLER, "prompts", {"prompts": 1}) == {CONTROLLER: {"prompts": 1}}
    assert events.receivers("prompts") == (ROLLOUT, TRAIN)
    assert events.signal(ROLLOUT, "rollout", {}) == {ROLLOUT: {}}
    assert events.receivers("rollout") == (TRAIN,)
    with pytest.raises(EngineError, match="rollout 0: signals rollout a second time"):
        events.signal(ROLLOUT, "rollout", {})
    events.begin()
    assert events.signal(ROLLOUT, "rollout", {}) == {ROLLOUT: {}}
    assert barrier_order(programs[ROLLOUT]) == ("rollout-complete",)


def test_an_event_of_several_ranks_is_signalled_when_the_last_has_said_its_part() -> None:
    ranks = [ProcessId("rollout", rank) for rank in range(3)]
    programs = {TRAIN: (Wait(window="w", event="rollout"),)}
    events = Events(programs | dict.fromkeys(ranks, (Signal(window="w", event="rollout"),)))
    assert events.signal(ranks[2], "rollout", {"part": 2}) == {}
    assert events.signal(ranks[0], "rollout", {"part": 0}) == {}
    assert "rollout" not in events.signalled
    with pytest.raises(EngineError, match="rollout 2: signals rollout a second time"):
        events.signal(ranks[2], "rollout", {"part": 2})
    assert list(events.signal(ranks[1], "rollout", {"part": 1}).items()) == [(r, {"part": r.rank}) for r in ranks]
    assert "rollout" in events.signalled


def test_who_is_on_the_way_has_not_arrived() -> None:
    first, second = ProcessId("train", 0), ProcessId("rollout", 0)
    barriers = Barriers([first, second], ["rollout-complete"])
    barriers.arrive(first, "rollout-complete")
    assert barriers.arrived == {first}
    barriers.arrive(second, "rollout-complete")
    assert barriers.arrived == frozenset()
