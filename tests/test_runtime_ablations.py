"""Figure 8 at run time: with room every ablation trains to the same bits; without, it dies where the compiler says.

                   paper, compiler and run: first window over
state offload      P1, before any optimizer step         resident rollout, whole update, two copies    P3 update
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from capacities import without_remedies
from megatron_tiny import megatron_plan
from runtime_threads import TRAIN, InThreads
from runtime_tiny import luck, tiny_plan

from benchmarks.ablations import MECHANISMS, NAMES, OF_MEGATRON, TRAINERS, Death, death, executed, may_die, small_job
from examples.grpo import grpo
from rollplex.ir.errors import OutOfMemory
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange, UpdateChunk
from rollplex.runtime.run import run_plan

torch.set_num_threads(1)
FIRST_OVER = {
    "state_offload": "P1 prefix-reference",
    "rollout_release": "P3 update",
    "chunked_optimizer": "P3 update",
    "weight_sharing": "P3 update",
    "naive": "P1 prefix-reference",
}
ROOM_KIB = 8192


@cache
def folder() -> Path:
    return Path(mkdtemp(prefix="rollplex-test-"))


@cache
def plan_of(name: str, capacity_kib: int) -> Plan:
    return without_remedies(grpo, small_job(folder(), name, capacity_kib))


@cache
def tight(name: str) -> Plan:
    return plan_of(name, 2040)


@cache
def trained(name: str, one_at_a_time: bool = False) -> dict[str, str]:
    """Digests after two steps with room, in threads; the arenas' log is compared with the plan on the way."""
    plan = plan_of(name, ROOM_KIB)
    if one_at_a_time:
        sizes = plan.summary.chunks.microbatch.model_copy(update={"suffix_responses": 1})
        chunks = plan.summary.chunks.model_copy(update={"microbatch": sizes})
        plan = plan.model_copy(update={"summary": plan.summary.model_copy(update={"chunks": chunks})})
    run = InThreads(plan, {"reward": luck})
    for step in range(2):
        run.step(step)
    found = run.train.digests() | run.rollout.digests()
    for update in run.states[TRAIN].updates.values():
        found |= update.digests()
    run.close()
    return found


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_with_room_a_schedule_without_one_mechanism_trains_to_the_same_bits(mechanism: str) -> None:
    assert plan_of(mechanism, ROOM_KIB).not_executable == ()
    assert trained(mechanism) == trained("full")


def test_megatron_trains_to_the_same_bits_with_states_resident_kv_kept_and_one_whole_chunk(tmp_path: Path) -> None:
    """Three ablations at once, in processes; the fourth, a second copy of the weights, is the host trainer's alone."""
    every = ("state_offload", "rollout_release", "chunked_optimizer")
    plans = [megatron_plan(1, ablate=list(ablate)) for ablate in ((), every)]
    runs = [run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path / str(i)) for i, plan in enumerate(plans)]
    assert runs[0].digests == runs[1].digests
    refused = megatron_plan(1, ablate=["weight_sharing"]).not_executable
    assert refused == ("a second copy of the weights: only the host trainer's lie as the rollout engine reads them",)


def test_the_naive_schedule_trains_to_the_bits_of_the_full_one_that_takes_one_response_at_a_time() -> None:
    assert plan_of("naive", ROOM_KIB).summary.chunks.microbatch.suffix_responses == 1
    assert trained("naive") == trained("full", one_at_a_time=True)


def test_each_ablation_leaves_out_what_it_says() -> None:
    """State in HBM, KV kept, one chunk of everything, a second copy that every publication writes over."""
    places = {name: plan_of(name, ROOM_KIB).summary.objects for name in NAMES}
    state = [o for o in places["state_offload"] if o.class_ == "permanent"]
    assert {p for o in state for p in o.residency.values()} == {"hbm"}
    kept = next(o for o in places["rollout_release"] if o.name == "rollout.kv")
    assert set(kept.residency.values()) == {"hbm"}
    whole = plan_of("chunked_optimizer", ROOM_KIB).programs["train"]
    assert len([s for s in whole if isinstance(s, UpdateChunk)]) == 1
    assert not any(o.readers for o in places["weight_sharing"])
    two = plan_of("weight_sharing", ROOM_KIB).programs
    sent = {kind: [s.object for s in two[kind] if isinstance(s, Exchange)] for kind in ("train", "rollout")}
    assert sent == {"train": ["actor.snapshot", "actor.vision"], "rollout": ["rollout.weights", "rollout.vision"]}


def test_the_second_copy_is_pages_of_its_own_with_the_bytes_of_the_new_weights() -> None:
    run = InThreads(plan_of("weight_sharing", ROOM_KIB), {"reward": luck})
    before = run.rollout.objects.pages("rollout.weights", torch.float32).clone()
    run.step(0)
    for part, copy in (("actor.snapshot", "rollout.weights"), ("actor.vision", "rollout.vision")):
        ours = run.train.objects.pages(part, torch.float32)
        theirs = run.rollout.objects.pages(copy, torch.float32)
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()
    assert not torch.equal(before, run.rollout.objects.pages("rollout.weights", torch.float32))
    assert run.train.objects.inodes() == run.rollout.objects.inodes() == {}
    held = {entry.object for entry in run.device.live() if entry.process == "rollout 0"}
    assert held == {"rollout.weights", "rollout.vision"}
    run.close()


@pytest.mark.parametrize("name", FIRST_OVER)
def test_without_room_the_compiler_names_the_window_of_the_paper(name: str) -> None:
    infeasible = tight(name).infeasible
    assert infeasible is not None
    assert infeasible.window == FIRST_OVER[name]
    assert tight("full").feasible


def died_in_threads(name: str) -> Death:
    with pytest.raises(OutOfMemory) as caught:  # noqa: PT012 (the naive schedule dies before its first step)
        run = InThreads(tight(name), {"reward": luck})
        run.step(0)
    error = caught.value.problems[0]
    return death(f"train 0: {error.where}", error.what)


@pytest.mark.parametrize("name", FIRST_OVER)
def test_executed_all_the_same_it_dies_there_by_the_budget_of_the_arena(name: str) -> None:
    """No step of another window is refused, and the object's shortfall is at most what the whole window lacks."""
    plan, died = tight(name), died_in_threads(name)
    assert plan.infeasible is not None
    assert died.window == plan.infeasible.window
    assert died.object in {o.name for o in plan.summary.objects if o.process == "train"}
    assert 0 < died.nbytes <= plan.infeasible.shortfall_bytes
    assert "train" in may_die(plan)
    if name != "naive":
        assert may_die(plan) == {"train"}
    if died.window == "P3 update":
        assert died.nbytes == plan.infeasible.shortfall_bytes  # the last object that comes in is the one that is over


@pytest.mark.parametrize("name", OF_MEGATRON)
def test_where_megatron_trains_it_ends_as_the_compiler_says_too(name: str, tmp_path: Path) -> None:
    plan = without_remedies(grpo, small_job(folder(), name, TRAINERS["megatron"][0], "megatron"))
    died = executed(plan, tmp_path / "run")
    assert (plan.infeasible and plan.infeasible.window) == (died and died.window) == FIRST_OVER.get(name)


def test_the_full_schedule_runs_on_the_same_device() -> None:
    run = InThreads(tight("full"), {"reward": luck})
    run.step(0)
    run.close()


def test_a_process_that_dies_for_want_of_memory_is_named_with_window_object_and_bytes(tmp_path: Path) -> None:
    plan = tight("weight_sharing")
    assert plan.infeasible is not None
    nbytes = plan.infeasible.shortfall_bytes
    assert executed(plan, tmp_path / "run") == Death("train 0", "P3 update", "optimizer.workspace", nbytes)


def test_two_gpus_with_a_second_copy_each_train_to_the_bits_of_shared_weights(tmp_path: Path) -> None:
    """Processes: each training rank sends to the rollout rank of its GPU, before the first step and after each."""
    shared, own = (
        run_plan(
            tiny_plan(cluster={"gpus_per_node": 2}, ablate=ablate, run={"steps": 2}),
            hosts={"reward": luck},
            out_dir=tmp_path / f"run-{len(ablate)}",
        )
        for ablate in ([], ["weight_sharing"])
    )
    assert shared.digests == own.digests
