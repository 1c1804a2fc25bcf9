"""The chunk-sizes pass on sizes one can draw; test_families.py holds it to enumeration."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from rollplex.ir.errors import PassError
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes.chunk_sizes import FAMILIES, Chunks, Data, Model, read
from rollplex.passes.pipeline import compile_plan, default_pipeline, run_passes, start
from rollplex.passes.solver import constrain, minimise
from rollplex.passes.state import Lifetimes, SizeChoice
from rollplex.passes.update_sizes import wanted_chunks

FILE = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"
JOB = load_job(FILE)


def data(parameters: int, room: int, ps: int, choices: tuple[SizeChoice, ...] | None = None) -> Data:
    return Data(
        parameters=parameters,
        in_flight=3,
        element_bytes=16,
        room={"P3 update": room, "P2 train": 10 << 30},
        choices=choices or (SizeChoice(8, {"train.activations": 1 << 20}),),
        alive={"train.activations": ("P2 train",)},
        update_window="P3 update",
        ps_per_element=ps,
        group=8,
    )


def solve(d: Data) -> Chunks:
    model = constrain(Model(d), FAMILIES)
    solution = minimise(model.cp, "chunk-sizes", model.objectives(), seconds=20, seed=0)
    assert solution is not None
    return read(JOB, model, solution)


def over(chunks: Chunks) -> float:
    return next(r.value for r in chunks.solvers if r.objective == "bytes over capacity")


def compiled(*overrides: str) -> Plan:
    return compile_plan(load_algorithm("examples/grpo.py"), load_job(FILE, overrides))


def test_chunks_in_flight_fit_the_room_that_residency_leaves() -> None:
    """[ room 1 GiB ]: three chunks in flight with all their state stay inside it."""
    chunks = solve(data(200_000_000, 1 << 30, 1_000))
    assert 0 < chunks.summary.optimizer.workspace_bytes <= 1 << 30
    assert chunks.nbytes["optimizer.workspace"] == chunks.summary.optimizer.workspace_bytes
    o = chunks.summary.optimizer
    assert (o.count - 1) * o.elements < 200_000_000 <= o.count * o.elements


def test_the_largest_suffix_step_that_fits_is_taken() -> None:
    """Steps of 1, 2, 4 or 8 responses; 4 need 8 GiB of a 10 GiB room, 8 need 16."""
    choices = tuple(SizeChoice(m, {"train.activations": 2 * m << 30}) for m in (1, 2, 4, 8))
    assert solve(data(1000, 1 << 30, 1, choices)).summary.microbatch.suffix_responses == 4


def test_workspaces_alive_together_are_added_up() -> None:
    """Two workspaces of 2 GiB a response in a 10 GiB window: two responses, not four."""
    choices = tuple(SizeChoice(m, {"train.activations": 2 * m << 30, "critic": 2 * m << 30}) for m in (1, 2, 4, 8))
    d = replace(data(1000, 1 << 30, 1, choices), alive=dict.fromkeys(("train.activations", "critic"), ("P2 train",)))
    assert solve(d).summary.microbatch.suffix_responses == 2


def test_what_even_the_smallest_step_lacks_is_told() -> None:
    """20 GiB for one response in a room of 10: one response, 10 GiB over."""
    choices = tuple(SizeChoice(m, {"train.activations": 20 * m << 30}) for m in (1, 2))
    chunks = solve(data(1000, 1 << 30, 1, choices))
    assert chunks.summary.microbatch.suffix_responses == 1
    assert over(chunks) == 10 << 30


def test_a_job_may_fix_the_number_of_chunks() -> None:
    """optimizer.chunks: 5 gives five chunks."""
    assert compiled("optimizer.chunks=5").summary.chunks.optimizer.count == 5


def test_chunks_that_are_too_large_do_not_fit() -> None:
    """All of the state in flight at once, 61 GiB: the update window is over by what the workspace lacks."""
    plan = compiled("optimizer.chunks=1")
    assert not plan.feasible
    assert plan.infeasible is not None
    assert plan.infeasible.window == "P3 update"
    assert plan.infeasible.objects[0].name == "optimizer.workspace"
    assert plan.summary.chunks.optimizer.count == 1


BYTES_OF_7B = 16 * ((7_615_616_512 - 57 * 3584) // 4 + 57 * 3584)
"""Four FP32 states of a rank of 4: a quarter of the language model of Qwen2.5-VL-7B, and all of its 57 norms."""


@pytest.mark.parametrize("chunks", [1, 2, 3, 8, 64])
def test_an_update_reserves_no_more_than_there_is(chunks: int) -> None:
    """Three chunks in flight: of one or two, all states and not three times or one and a half times as many."""
    job = load_job("examples/jobs/critic_free_7b_h800x8.yaml", (f"optimizer.chunks={chunks}",))
    passes = list(itertools.takewhile(lambda p: p.name != "residency", default_pipeline()))
    reserved = run_passes(start(load_algorithm("examples/grpo.py"), job), passes)[Lifetimes]["optimizer.workspace"]
    exact = BYTES_OF_7B * min(3, chunks) // chunks
    assert 0 <= reserved.nbytes - exact <= 2 * (2 << 20)


def test_a_whole_update_fits_beside_little_host_memory() -> None:
    """7B at TP 4 in one chunk: 28.4 GiB of states and no workspace three times as large, so that none must leave."""
    job = load_job("examples/jobs/critic_free_7b_h800x8.yaml", ("optimizer.chunks=1", "cluster.host_memory_gb=300"))
    plan = compile_plan(load_algorithm("examples/grpo.py"), job)
    assert plan.feasible
    states = [plan.object(f"actor.{name}") for name in ("gradients", "master", "moments")]
    assert 0 <= sum(o.bytes for o in states) - BYTES_OF_7B < 3 * (2 << 20)
    assert {o.residency["P3 update"] for o in states} == {"hbm"}


def test_a_number_of_chunks_that_cannot_be_made_is_refused() -> None:
    """5 units of 64: chunks of 2 make three, chunks of 1 make five; four cannot be made."""
    job = JOB.model_copy(update={"optimizer": JOB.optimizer.model_copy(update={"chunks": 4})})
    assert wanted_chunks(job, 8) == 4
    with pytest.raises(PassError) as refused:
        wanted_chunks(job, 5)
    assert str(refused.value) == (
        "optimizer.chunks: 5 x 64 parameters of a rank do not make 4 equal chunks\n    try: 3 or 5, or auto"
    )


RESIDENT = """\
model: Qwen2.5-VL-3B
cluster: {gpu: H200, gpus_per_node: 1, host_memory_gb: 128}
roles:
  actor:
    train: {engine: megatron}
    rollout: {engine: vllm, kv_cache_gib: 40}
  reference:
    score: {engine: megatron}
workload: {prompts: 4, group: 8, prompt_tokens: 4096, response_tokens: 512}
"""


def test_an_update_in_hbm_on_a_gpu_takes_a_page(tmp_path: Path) -> None:
    """torch's fused Adam reads and writes the states where they are: one chunk, and room for the numbers of a step."""
    (tmp_path / "job.yaml").write_text(RESIDENT)
    plan = compile_plan(load_algorithm("examples/grpo.py"), load_job(tmp_path / "job.yaml"))
    assert all(set(plan.object(f"actor.{name}").residency.values()) <= {"hbm", "-"} for name in ("master", "moments"))
    assert plan.object("optimizer.workspace").bytes == plan.summary.chunks.optimizer.workspace_bytes == 2 << 20
    assert plan.summary.chunks.optimizer.count == 1
