"""The residency pass: optimal against brute force, and each constraint family matters."""

from __future__ import annotations

import itertools
import random

import pytest

from rollplex.ir.job import Job, load_job
from rollplex.passes.costs import Costs
from rollplex.passes.residency import UNIT, Data, Model, Place, Residency, read
from rollplex.passes.schedule import Call, Schedule, windows_of
from rollplex.passes.solver import minimise
from rollplex.passes.state import START, Lifetimes, StateObject

JOB = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"
CALLS = [
    Call("rollout", "actor", "generate", True),
    Call("kv_ref", "reference", "prefix", False),
    Call("ref_logp", "reference", "suffix", False, "kv_ref"),
    Call("kv_logp", "actor", "prefix", True),
    Call("logp", "actor", "suffix", True, "kv_logp"),
    Call("update", "actor", "update", True),
]
GIB = 2**30
BOTH: frozenset[Place] = frozenset({"hbm", "host"})


def schedule(kind: str) -> Schedule:
    return Schedule(kind, tuple(windows_of(CALLS, kind)), tuple(CALLS), (), {})


def solve(data: Data) -> tuple[Residency, tuple[int, ...]]:
    model = Model(data)
    model.add_constraints()
    solution = minimise(model.cp, "residency", model.objectives(), seconds=20, seed=0)
    assert solution is not None
    assert all(r.status == "optimal" for r in solution.results)
    values = tuple(round(r.value / (1e-6 if "seconds" in r.objective else UNIT)) for r in solution.results)
    return read(model, solution), values


def brute_force(data: Data) -> tuple[int, ...]:
    """The best (over, exposed, peak, moved) over every assignment of places, computed without the solver's model."""
    slots = [(o, w) for o in data.lifetimes.objects for w in o.alive(data.windows)]
    domains = []
    for o, w in slots:
        needed = o.always or not o.options or o.uses.get(w) == "hbm"
        domains.append(("hbm",) if needed else tuple(sorted(o.options)))
    return min(
        score(data, {(o.name, w): p for (o, w), p in zip(slots, places, strict=True)})
        for places in itertools.product(*domains)
        if steady(data, slots, places)
    )


def steady(data: Data, slots: list, places: tuple) -> bool:
    """A recomputable object keeps one place."""
    kept: dict[str, set[str]] = {}
    for (o, _), place in zip(slots, places, strict=True):
        if o.recomputable:
            kept.setdefault(o.name, set()).add(place)
    return all(len(found) == 1 for found in kept.values())


def score(data: Data, at: dict[tuple[str, str], str]) -> tuple[int, ...]:
    names, objects = data.windows, data.lifetimes.objects
    held = {w: sum(o.nbytes // UNIT for o in objects if at.get((o.name, w)) == "hbm") for w in names}
    backed = sum(o.nbytes for o in objects if o.host_backed) // UNIT
    host = {
        w: backed + sum(o.nbytes // UNIT for o in objects if at.get((o.name, w)) == "host" and not o.host_backed)
        for w in names
    }
    over = sum(max(0, held[w] - data.job.capacity_bytes // UNIT) for w in names)
    over += sum(max(0, host[w] - data.host_share // UNIT) for w in names)
    costs, late, moved = Costs(data.job), dict.fromkeys(names, 0), 0
    for o in objects:
        alive = o.alive(names)
        cyclic = len(alive) == len(names)
        for i, w in enumerate(alive):
            here = at[o.name, w]
            if (i or cyclic) and not o.recomputable:
                there = at[o.name, alive[i - 1]]
                crossed = here != there and "hbm" in (here, there) and (here == "hbm" or not o.host_backed)
                late[w] += crossed * round(costs.link_s(o.nbytes) * 1e6)
                moved += crossed * (o.nbytes // UNIT)
            if o.uses.get(w) == "stream" and here == "host":
                hidden = data.timeline.compute[w] if o.recomputable else 0.0
                late[w] += round(max(0.0, costs.link_s(o.nbytes) - hidden) * 1e6)
                moved += o.nbytes // UNIT
            if here == "dropped" and w == alive[-1]:
                late[w] += data.recompute_us(o, w)
    exposed = sum(max(0, sum(late[w] for w in windows) - slack) for windows, slack in data.stretches)
    return over, exposed, max(held.values()), moved


def random_objects(rng: random.Random, names: tuple[str, ...]) -> tuple[StateObject, ...]:
    """A frozen weight, a streamed permanent state, a saved state, and one fixed object, of random sizes."""
    size = lambda: rng.randint(1, 30) * GIB  # noqa: E731
    places: list[tuple[Place, ...]] = [
        ("hbm",),
        ("host",),
        ("hbm", "host"),
        ("hbm", "host", "dropped"),
        ("dropped", "host"),
    ]
    first = rng.randrange(len(names) - 1)
    return (
        StateObject("frozen", "", "regenerable", "reference", size(), {names[0]: "hbm", rng.choice(names[1:]): "hbm"},
                    host_backed=True, options=BOTH),
        StateObject("state", "", "permanent", "actor", size(), {rng.choice(names): "stream"}, options=BOTH),
        StateObject("saved", "", "phase-local", "actor", size(), {names[first]: "stream", names[-1]: "stream"},
                    produced=names[first], recomputable=True, options=frozenset(rng.choice(places))),
        StateObject("fixed", "", "phase-local", "actor", size(), {names[1]: "hbm"}, produced=names[1]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("kind", ["rollplex", "serial"])
def test_the_solver_is_optimal_on_small_instances(seed: int, kind: str) -> None:
    """Random objects and capacities: the lexicographic optimum equals the minimum over all assignments."""
    rng = random.Random(seed)
    job = load_job(
        JOB, [f"cluster.capacity_gib={rng.randint(20, 70)}", f"cluster.host_memory_gb={rng.randint(100, 900)}"]
    )
    data = Data(job, schedule(kind), Lifetimes(random_objects(rng, schedule(kind).names())))
    assert solve(data)[1] == brute_force(data)


def lone(o: StateObject, job: Job, kind: str = "rollplex") -> Residency:
    return solve(Data(job, schedule(kind), Lifetimes((o,))))[0]


def test_a_permanent_object_stays_at_the_host_when_hbm_is_short() -> None:
    """[ 40 GiB of state ] in [ 30 GiB of HBM ]: host everywhere, nothing over capacity."""
    names = schedule("rollplex").names()
    state = StateObject("state", "", "permanent", "actor", 40 * GIB, {names[-2]: "stream"}, options=BOTH)
    found = lone(state, load_job(JOB, ["cluster.capacity_gib=30"]))
    assert set(found.places["state"].values()) == {"host"}
    assert not found.over_hbm


def test_what_fits_stays_in_hbm_and_moves_nothing() -> None:
    """[ 20 GiB of state ] in [ 79 GiB ]: no transfer is the least exposed time."""
    names = schedule("rollplex").names()
    state = StateObject("state", "", "permanent", "actor", 20 * GIB, {names[-2]: "stream"}, options=BOTH)
    found = lone(state, load_job(JOB))
    assert set(found.places["state"].values()) == {"hbm"}
    assert found.moved_bytes == 0


def test_over_capacity_is_reported_by_window() -> None:
    """A fixed object larger than HBM: its windows are over, by the difference."""
    names = schedule("rollplex").names()
    big = StateObject("big", "", "phase-local", "actor", 50 * GIB, {names[1]: "hbm"}, produced=names[1])
    found = lone(big, load_job(JOB, ["cluster.capacity_gib=40"]))
    assert found.over_hbm == {names[1]: 10 * GIB}


def test_start_is_cyclic() -> None:
    """A frozen weight used in the first and the fourth window: the iteration ends with it where it begins."""
    names = schedule("rollplex").names()
    weights = StateObject("w", "", "regenerable", "reference", 8 * GIB, {names[0]: "hbm", names[3]: "hbm"},
                          produced=START, host_backed=True, options=BOTH)  # fmt: skip
    places = lone(weights, load_job(JOB)).places["w"]
    assert set(places) == set(names)
    assert places[names[0]] == places[names[3]] == "hbm"
