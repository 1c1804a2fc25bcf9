"""The residency pass on objects one can draw; test_families.py holds it to enumeration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollplex.ir.job import Job, load_job
from rollplex.passes.residency import FAMILIES, Model, Place, Residency, read
from rollplex.passes.residency_data import UNIT, Data, data_of
from rollplex.passes.schedule import Call, Schedule, windows_of
from rollplex.passes.solver import constrain, minimise
from rollplex.passes.state import START, Lifetimes, SizeChoice, StateObject
from rollplex.passes.timeline import Added

JOB = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"
CALLS = [
    Call("rollout", "actor", "generate", True),
    Call("kv_ref", "reference", "prefix", False),
    Call("ref_logp", "reference", "suffix", False, ("kv_ref",)),
    Call("kv_logp", "actor", "prefix", True),
    Call("logp", "actor", "suffix", True, ("kv_logp",)),
    Call("update", "actor", "update", True),
]
GIB = 2**30
BOTH: frozenset[Place] = frozenset({"hbm", "host"})


def schedule(kind: str) -> Schedule:
    scored = [c for c in CALLS if c.op == "suffix"]
    return Schedule(kind, tuple(windows_of(CALLS, scored, kind)), tuple(CALLS), (), {}, {})


def solve(data: Data) -> Residency:
    model = constrain(Model(data), FAMILIES)
    solution = minimise(model.cp, "residency", model.objectives(), seconds=20, seed=0)
    assert solution is not None
    assert all(r.status == "optimal" for r in solution.results)
    return read(model, solution)


def lone(o: StateObject, job: Job, kind: str = "rollplex") -> Residency:
    return solve(data_of(job, schedule(kind), Lifetimes((o,)), Added()))


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


def test_what_is_made_and_used_up_within_an_iteration_is_not_cyclic() -> None:
    """[ made in the first window .. used in the last ]: it does not come back from the end of the iteration."""
    names = schedule("rollplex").names()
    state = StateObject("s", "", "phase-local", "actor", 8 * GIB, {names[-1]: "hbm"}, produced=names[0], options=BOTH)
    weights = replace(state, name="w", produced=START)
    data = data_of(load_job(JOB), schedule("rollplex"), Lifetimes((state, weights)), Added())
    made, kept = data.items
    assert made.alive == kept.alive == names
    assert (names[-1], names[0]) in tuple(kept.pairs())
    assert (names[-1], names[0]) not in tuple(made.pairs())


def test_numbers_of_the_model_are_those_of_the_job() -> None:
    """8 GiB over 50 GB/s are 171.8 ms; 79.1 GiB of HBM; 85 % of 1.4 TB over eight GPUs; decode leaves a tail."""
    names = schedule("rollplex").names()
    saved = StateObject("s", "", "phase-local", "actor", 8 * GIB + 1, {names[1]: "stream", names[4]: "stream"},
                        produced=names[1], recomputable=True, options=BOTH)  # fmt: skip
    job = load_job(JOB)
    data = data_of(job, schedule("rollplex"), Lifetimes((saved,)), Added())
    (item,) = data.items
    assert item.units == 8 * GIB // UNIT + 1
    assert item.link_us == round(8 * GIB / (job.device.host_link_gb_s * 1e9) * 1e6)
    assert item.streams == {names[1], names[4]}
    assert item.places == dict.fromkeys(names[1:5], BOTH)
    assert data.capacity * UNIT == pytest.approx(79.1 * GIB, abs=UNIT)
    assert data.host_capacity == int(1400e9 * 0.85) // 8 // UNIT
    assert data.stretches[0].windows == names[:3]
    assert data.stretches[0].slack_us > 0
    assert all(k.slack_us == 0 and len(k.windows) == 1 for k in data.stretches[1:])


def test_serial_phases_hide_nothing() -> None:
    """One stretch a window, without slack."""
    data = data_of(load_job(JOB), schedule("serial"), Lifetimes(()), Added())
    assert [k.windows for k in data.stretches] == [(w,) for w in data.windows]
    assert not any(k.slack_us for k in data.stretches)


@pytest.mark.parametrize(("again", "place"), [(20, "dropped"), (40, "hbm")])
def test_what_is_dropped_must_fit_where_it_is_made_again(again: int, place: Place) -> None:
    """[ 28 GiB saved | 5 of work ] in [ 30 GiB ]: 3 over; dropped, [ work ] has 20, or else 40, which is 10 over."""
    names = schedule("serial").names()
    train, (*_, prefix) = names[-3], (n for n in names[:-3] if "prefix" in n)
    saved = StateObject("saved", "", "phase-local", "actor", 28 * GIB, dict.fromkeys((prefix, train), "stream"),
                        produced=prefix, recomputable=True, options=frozenset({"hbm", "dropped"}))  # fmt: skip
    work = StateObject("work", "", "phase-local", "actor", 5 * GIB, {train: "hbm"}, produced=train, workspace=True)
    sizes = SizeChoice(1, {"work": 5 * GIB}, {"saved": {"work": again * GIB}})
    job = load_job(JOB, ["cluster.capacity_gib=30"])
    found = solve(data_of(job, schedule("serial"), Lifetimes((saved, work), (sizes,)), Added()))
    assert set(found.places["saved"].values()) == {place}
    assert found.over_hbm == ({} if place == "dropped" else {train: 3 * GIB})


@pytest.mark.parametrize(("prompts", "place"), [(32, "host"), (2, "hbm")])
def test_larger_suffix_steps_are_worth_what_they_save(prompts: int, place: Place) -> None:
    """[ 120 GiB of state | 8 of work, or 1 ] in [ 125 GiB ]: it leaves for many groups, not for two."""
    names = schedule("serial").names()
    train, update = names[-3], names[-2]
    state = StateObject("state", "", "permanent", "actor", 120 * GIB, {update: "stream"}, options=BOTH)
    work = StateObject("work", "", "phase-local", "actor", GIB, {train: "hbm"}, produced=train, workspace=True)
    sizes = tuple(SizeChoice(m, {"work": m * GIB}) for m in (1, 8))
    job = load_job(JOB, ["cluster.capacity_gib=125", f"workload.prompts={prompts}"])
    data = data_of(job, schedule("serial"), Lifetimes((state, work), sizes), Added())
    assert [size.late_us > 0 for size in data.sizes] == [True, False]
    found = solve(data)
    assert found.places["state"][train] == place
    assert not found.over_hbm


def test_an_object_that_nothing_makes_again_is_never_dropped() -> None:
    """`dropped` is for recomputable objects: anything else would lose its contents without a price."""
    lost = StateObject("s", "", "permanent", "actor", GIB, {}, options=frozenset({"hbm", "dropped"}))
    with pytest.raises(AssertionError, match="s may be dropped, but nothing makes it again"):
        data_of(load_job(JOB), schedule("serial"), Lifetimes((lost,)), Added())
