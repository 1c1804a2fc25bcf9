"""The chunk-sizes pass: chunks cover the parameters, fit the room, and are the best of all sizes by brute force."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rollplex.ir.job import load_job
from rollplex.passes.chunk_sizes import ALIGN, LAUNCH_US, Data, build, read
from rollplex.passes.inventory import MIN_CHUNKS
from rollplex.passes.solver import minimise
from rollplex.passes.state import SizeChoice

JOB = load_job("examples/jobs/qwen2_5_vl_32b_h800x8.yaml")


def data(parameters: int, room: int, ns: int, choices: tuple[SizeChoice, ...] | None = None) -> Data:
    return Data(
        job=JOB,
        parameters=parameters,
        in_flight=3,
        element_bytes=16,
        room={"P3 update": room, "P2 train": 10 << 30},
        choices=choices or (SizeChoice(8, {"train.activations": 1 << 20}),),
        windows_of={"train.activations": ("P2 train",)},
        update_window="P3 update",
        ns_per_element=ns,
        whole=False,
    )


def solve(d: Data):
    model, variables, objectives = build(d)
    solution = minimise(model, "chunk-sizes", objectives, seconds=20, seed=0)
    assert solution is not None
    return read(d, variables, solution), solution.results


def brute_force_us(d: Data) -> int:
    """The least update time over every chunk size in units of 64 elements, straight from the docstring's formula."""
    total = -(-d.parameters // ALIGN)
    unit = ALIGN * d.element_bytes * d.in_flight
    room = max(d.room["P3 update"], -(-d.parameters // MIN_CHUNKS) * d.element_bytes * d.in_flight + unit)
    best = None
    for units in range(1, total + 1):
        count = -(-total // units)
        if units * unit > room or count > 4096:
            continue
        chunk = -(-(units * ALIGN * d.ns_per_element + LAUNCH_US * 10**6) // 10**6)
        time = chunk * (count + d.in_flight - 1)
        best = time if best is None else min(best, time)
    assert best is not None
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_solver_is_optimal_on_small_instances(seed: int) -> None:
    """Random parameters, room and link speed: update time equals the minimum over every legal chunk size."""
    rng = random.Random(seed)
    d = data(rng.randint(1, 60_000), rng.randint(1 << 10, 4 << 20), rng.choice([1, 200_000, 5_000_000]))
    chunks, results = solve(d)
    time = next(r for r in results if r.objective == "update seconds")
    assert time.status == "optimal"
    assert round(time.value * 1e6) == brute_force_us(d)
    o = chunks.summary.optimizer
    assert (o.count - 1) * o.elements < d.parameters <= o.count * o.elements


def test_chunks_in_flight_fit_the_room_that_residency_leaves() -> None:
    """[ room 1 GiB ]: three chunks in flight with all their state stay inside it."""
    chunks, _ = solve(data(200_000_000, 1 << 30, 1_000))
    assert 0 < chunks.summary.optimizer.workspace_bytes <= 1 << 30
    assert chunks.nbytes["optimizer.workspace"] == chunks.summary.optimizer.workspace_bytes


def test_the_largest_suffix_step_that_fits_is_taken() -> None:
    """Steps of 1, 2, 4 or 8 responses; 4 need 8 GiB of a 10 GiB room, 8 need 16."""
    choices = tuple(SizeChoice(m, {"train.activations": 2 * m << 30}) for m in (1, 2, 4, 8))
    assert solve(data(1000, 1 << 30, 1, choices))[0].summary.microbatch.suffix_responses == 4


def test_the_smallest_step_is_kept_when_nothing_fits() -> None:
    """Room for less than one response: one response, and the residency pass has said that the job is over."""
    choices = tuple(SizeChoice(m, {"train.activations": 20 * m << 30}) for m in (1, 2))
    assert solve(data(1000, 1 << 30, 1, choices))[0].summary.microbatch.suffix_responses == 1


def test_a_job_may_fix_the_number_of_chunks() -> None:
    """optimizer.chunks: 5 gives five chunks; of 4 units of 64 elements only four can be made."""
    job = JOB.model_copy(update={"optimizer": JOB.optimizer.model_copy(update={"chunks": 5})})
    chunks, _ = solve(replace(data(100_000, 1 << 30, 1_000), job=job))
    assert chunks.summary.optimizer.count == 5
    chunks, _ = solve(replace(data(4 * 64, 1 << 30, 1_000), job=job))
    assert chunks.summary.optimizer.count == 4
