"""Clocks, reachable states and peaks against brute force: every execution of small programs, one step at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants.edit import with_object
from tinyplan import tiny_plan

from rollplex.ir.check.capacity import Cuts, loads, peaks
from rollplex.ir.check.facts import TIMELINE, Facts
from rollplex.ir.check.order import execute
from rollplex.ir.check.residency import replay
from rollplex.ir.check.rules import At
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Barrier, Exchange, Map, Signal, Step, Unmap, Wait

State = tuple[int, ...]


def may_step(plan: Plan, state: State, process: int) -> bool:
    """Whether a process can do its next step: an event is there, or everybody stands at the same meeting."""
    names = list(plan.programs)
    step = next_step(plan, state, process)
    match step:
        case None:
            return False
        case Wait(event=event):
            done = (s for n, i in zip(names, state, strict=True) for s in plan.programs[n][:i])
            return any(isinstance(s, Signal) and s.event == event for s in done)
        case _:
            return True


def next_step(plan: Plan, state: State, process: int) -> Step | None:
    program = list(plan.programs.values())[process]
    return program[state[process]] if state[process] < len(program) else None


def meets(plan: Plan, step: Step | None) -> list[int]:
    """Who enters a meeting: everybody for a barrier, the programs of the group for an exchange of several."""
    names = list(plan.programs)
    if isinstance(step, Barrier):
        return list(range(len(names)))
    if isinstance(step, Exchange):
        inside = [
            k for k, n in enumerate(names) if any(getattr(s, "group", "") == step.group for s in plan.programs[n])
        ]
        return inside if len(inside) > 1 else []
    return []


def key(step: Step | None) -> tuple[str, str]:
    return getattr(step, "kind", ""), getattr(step, "name", getattr(step, "group", ""))


def successors(plan: Plan, state: State) -> Iterator[State]:
    """Every state one step later. A meeting lets its members go one by one: each may be the first to leave."""
    for k in range(len(state)):
        if not may_step(plan, state, k):
            continue
        step = next_step(plan, state, k)
        at = [m for m in meets(plan, step) if m != k]
        arrived = all(state[m] >= place(plan, m, key(step)) for m in at)
        if arrived:
            yield (*state[:k], state[k] + 1, *state[k + 1 :])


def place(plan: Plan, process: int, meeting: tuple[str, str]) -> int:
    program = list(plan.programs.values())[process]
    return next((i for i, s in enumerate(program) if key(s) == meeting), len(program) + 1)


def reachable(plan: Plan) -> set[State]:
    """All states that any execution passes."""
    todo, seen = [(0,) * len(plan.programs)], set[State]()
    while todo:
        state = todo.pop()
        if state not in seen:
            seen.add(state)
            todo.extend(successors(plan, state))
    return seen


def held_bytes(plan: Plan, state: State) -> int:
    """Bytes that are mapped in a state, read off the programs directly."""
    total = sum(o.bytes for o in plan.summary.objects if o.start == "hbm")
    sizes = {o.name: o.bytes for o in plan.summary.objects}
    for n, i in zip(plan.programs, state, strict=True):
        for step in plan.programs[n][:i]:
            sign = {"map": 1, "fetch": 1, "unmap": -1, "offload": -1, "drop": -1}.get(step.kind, 0)
            total += sign * sizes.get(getattr(step, "object", ""), 0)
    return total


def brute_peaks(plan: Plan) -> dict[str, int]:
    """The most bytes by window over all reachable states."""
    timeline, best = list(plan.programs).index(TIMELINE), dict[str, int]()
    for state in reachable(plan):
        step = next_step(plan, state, timeline)
        if step is not None:
            best[step.window] = max(best.get(step.window, 0), held_bytes(plan, state))
    return best


def checked_peaks(plan: Plan) -> dict[str, int]:
    facts = Facts(plan)
    order, _ = execute(facts)
    pages = [s for one in replay(facts).values() for s in one.spans.pages]
    return {w: p.nbytes for w, p in peaks(Cuts(facts, order), loads(facts, pages)).items()}


@pytest.mark.parametrize("variant", ["rollplex", "serial", "apart"])
def test_peaks_of_the_plans_by_hand(variant: str) -> None:
    plan = tiny_plan(variant)  # type: ignore[arg-type]
    assert checked_peaks(plan) == brute_peaks(plan)


@pytest.mark.parametrize("variant", ["rollplex", "serial", "apart"])
def test_intervals_are_the_reachable_states(variant: str) -> None:
    """For every state of the trainer, exactly those of rollout that some execution has beside it."""
    plan = tiny_plan(variant)  # type: ignore[arg-type]
    facts = Facts(plan)
    cuts, names = Cuts(facts, execute(facts)[0]), list(plan.programs)
    pairs = {(s[names.index("train")], s[names.index("rollout")]) for s in reachable(plan)}
    states = range(len(plan.programs["train"]) + 1)
    assert pairs == {(i, j) for i in states for j in cuts.interval("train", "rollout", i)}


# ---- random programs


@st.composite
def random_plan(draw: st.DrawFn) -> Plan:
    """Three programs that map and unmap objects of their own, and meet at barriers and events that may block."""
    base = with_object(tiny_plan(), "optimizer.workspace", process="controller")
    window = base.summary.windows[0].name
    owned = {"train": ["train.activations", "reference.workspace"], "rollout": ["rollout.kv"]}
    owned["controller"] = ["optimizer.workspace"]
    programs: dict[str, list[Step]] = {name: [] for name in owned}
    events = [f"e{i}" for i in range(draw(st.integers(0, 5)))]
    for event in events:
        a, b, _ = draw(st.permutations(list(programs)))
        programs[a].append(Signal(window=window, event=event))
        programs[b].append(Wait(window=window, event=event))
    for process, names in owned.items():
        for name in names:
            cut = sorted(draw(st.lists(st.integers(0, len(programs[process])), min_size=2, max_size=2)))
            programs[process].insert(cut[0], Map(window=window, object=name))
            programs[process].insert(cut[1] + 1, Unmap(window=window, object=name))
    for name in [f"b{i}" for i in range(draw(st.integers(0, 2)))]:
        for process in programs:
            programs[process].insert(draw(st.integers(0, len(programs[process]))), Barrier(window=window, name=name))
    return base.model_copy(update={"programs": {p: tuple(s) for p, s in programs.items()}})


@settings(max_examples=300, deadline=None)
@given(plan=random_plan())
def test_peaks_of_random_programs(plan: Plan) -> None:
    """A deadlock is reported exactly where no execution comes to the end; else all peaks agree."""
    facts = Facts(plan)
    _, violations = execute(facts)
    stuck = any(v.kind == "deadlock" for v in violations)
    last = tuple(len(steps) for steps in plan.programs.values())
    assert stuck == (last not in reachable(plan))
    if not stuck:
        assert checked_peaks(plan) == brute_peaks(plan)


@settings(max_examples=200, deadline=None)
@given(plan=random_plan(), data=st.data())
def test_before_is_what_every_execution_does(plan: Plan, data: st.DataObject) -> None:
    """a is before b exactly when a is done in every reachable state in which b is next or done."""
    order, violations = execute(Facts(plan))
    if any(v.kind == "deadlock" for v in violations):
        return
    states, names = reachable(plan), list(plan.programs)
    a, b = (
        At(p, i, plan.programs[p][i])
        for p in ("train", "rollout")
        for i in (data.draw(st.integers(0, len(plan.programs[p]) - 1)),)
    )
    done_after = all(s[names.index("train")] > a.index for s in states if s[names.index("rollout")] >= b.index)
    assert order.before(a, b) == done_after
