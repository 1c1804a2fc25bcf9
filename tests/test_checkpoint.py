"""Checkpoints: every bit that the next step needs, whole files or none, and broken or foreign ones told apart.

step 0, step 1, step 2                       one engine
step 0, keep | take_up, step 1, step 2       two: the same digests of weights, moments, rollouts
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_threads import InThreads
from runtime_tiny import luck, tight_plan, tiny_job, tiny_plan
from safetensors.torch import load_file

from rollplex.backends.carried import FileRecord, SavedTensors, write_tensors
from rollplex.ir.errors import DataError, RunError
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan
from rollplex.runtime import checkpoint
from rollplex.runtime.carrying import file_name, first_copy, keep, take_up
from rollplex.runtime.protocol import CONTROLLER, ProcessId

TENSORS = {
    "a": torch.arange(6, dtype=torch.float64).view(2, 3),
    "b": torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
    "none": torch.empty(0, dtype=torch.float32),
    "rng": torch.arange(7, dtype=torch.uint8),
}


# ---- the state itself


def bits(run: InThreads) -> dict[str, str]:
    update = run.states[ProcessId("train", 0)].optimizer("actor")
    return run.train.digests() | run.rollout.digests() | update.digests() | {"steps": str(update.steps)}


def kept(run: InThreads, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    return {str(process): keep(state, run.job, folder) for process, state in run.states.items()}


def taken_up(plan: Plan, folder: Path, noted: dict[str, Any]) -> InThreads:
    run = InThreads(plan, {"reward": luck})
    for process, state in run.states.items():
        take_up(state, run.job, folder, json.loads(json.dumps(noted[str(process)])))
    return run


WIDE: dict[str, Any] = {
    "actor": {
        "train": {"engine": "host"},
        "rollout": {"engine": "host", "kv_cache_gib": "1 MiB", "runtime_gib": "512 KiB"},
    },
    "reference": {"score": {"engine": "host"}},
}
PLANS: dict[str, Callable[[], Plan]] = {
    "resident": lambda: tiny_plan(run={"steps": 3}),
    "streamed from the host": lambda: tight_plan(run={"steps": 3}),
    "float64, serial": lambda: tiny_plan(schedule="serial", model={"dtype": "float64"}, roles=WIDE),
    "a second copy of the actor": lambda: tiny_plan(ablate=["weight_sharing"]),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_run_that_is_taken_up_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]()
    whole = InThreads(plan, {"reward": luck})
    whole.step(0)
    noted = kept(whole, tmp_path / "c")
    after_one = bits(whole)
    whole.step(1)
    whole.step(2)

    other = taken_up(plan, tmp_path / "c", noted)
    assert bits(other) == after_one
    other.step(1)
    other.step(2)
    assert bits(other) == bits(whole)
    assert bits(whole) != after_one
    for run in (whole, other):
        run.close()


def test_a_checkpoint_holds_the_weights_the_master_copy_and_the_moments_as_safetensors(tmp_path: Path) -> None:
    run = InThreads(tiny_plan(), {"reward": luck})
    run.step(0)
    noted = kept(run, tmp_path / "c")
    found = load_file(tmp_path / "c" / "train-0.safetensors")
    assert set(found) == {"actor.snapshot", "actor.vision", "actor.master", "actor.moments", "rng"}
    assert torch.equal(found["actor.master"], run.train.objects.current("actor.master", torch.float32))
    assert noted["train 0"]["updates"] == {"actor": {"steps": 1}}
    assert set(noted["train 0"]["tasks"]["frozen"]) == {"reference.weights", "reference.vision"}
    run.close()


def test_other_reference_weights_or_other_rows_are_refused(tmp_path: Path) -> None:
    run = InThreads(tiny_plan(), {"reward": luck})
    noted = kept(run, tmp_path / "c")
    run.close()
    other = InThreads(tiny_plan(run={"seed": 3}), {"reward": luck})
    with pytest.raises(RunError, match=r"run\.weights: reference\.weights is not what the run began with"):
        take_up(other.states[ProcessId("train", 0)], other.job, tmp_path / "c", noted["train 0"])
    before = {**noted["train 0"], "tasks": {"frozen": noted["train 0"]["tasks"]["frozen"]}}
    with pytest.raises(RunError, match="digests of frozen weights are another version's"):
        take_up(other.states[ProcessId("train", 0)], other.job, tmp_path / "c", before)
    other.feed.rows = other.feed.rows[:-1]
    with pytest.raises(DataError, match=r"train\.jsonl: it holds other rows than the run began with \(11, then 12\)"):
        take_up(other.states[CONTROLLER], other.job, tmp_path / "c", noted["controller 0"])
    other.close()


def test_what_all_copies_hold_alike_is_written_by_the_first(tmp_path: Path) -> None:
    """TP 2 trains, TP 1 rolls out, 8 GPUs: rank 5 has the part of rank 1; rollout engines are alike."""
    data = tiny_job().model_dump()
    actor = {
        **data["roles"]["actor"],
        "train": {"engine": "megatron", "tensor_parallel": 2},
        "rollout": {"engine": "host", "kv_cache_gib": 1},
    }
    cluster = {**data["cluster"], "gpus_per_node": 8, "host_memory_gb": 100}
    workload = {**data["workload"], "prompts": 8}
    job = Job.model_validate({**data, "cluster": cluster, "roles": {"actor": actor}, "workload": workload})
    assert [first_copy(job, ProcessId("train", r)).rank for r in range(8)] == [0, 1] * 4
    assert [first_copy(job, ProcessId("rollout", r)).rank for r in range(8)] == [0] * 8
    assert file_name(ProcessId("train", 5)) == "train-5.safetensors"


# ---- files


def test_a_file_is_safetensors_and_its_checksum_is_of_its_bytes(tmp_path: Path) -> None:
    record = write_tensors(tmp_path / "x.safetensors", TENSORS)
    body = (tmp_path / "x.safetensors").read_bytes()
    assert record == FileRecord("x.safetensors", len(body), sha256(body).hexdigest())
    for found in (load_file(tmp_path / "x.safetensors"), SavedTensors(tmp_path / "x.safetensors")):
        assert set(found) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found[name], tensor)
    assert record.wrong(tmp_path) == ""


def test_a_file_that_was_cut_off_or_changed_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    record, body = write_tensors(path, TENSORS), path.read_bytes()
    path.write_bytes(body[:-1])
    assert record.wrong(tmp_path) == f"x.safetensors has {len(body) - 1} bytes, {len(body)} were written"
    path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    assert record.wrong(tmp_path) == "x.safetensors holds other bytes than were written"
    path.unlink()
    assert record.wrong(tmp_path) == "x.safetensors: No such file or directory"


def test_a_full_disk_is_told_with_the_file() -> None:
    with pytest.raises(RunError, match=r"/dev/full: cannot write the checkpoint: No space left on device"):
        write_tensors(Path("/dev/full"), TENSORS)


# ---- checkpoints of a run


def write(out: Path, step: int, plan: str = "p") -> None:
    def parts(folder: Path) -> dict[str, Any]:
        record = write_tensors(folder / "train-0.safetensors", {"step": torch.tensor([step])})
        return {"train 0": {"file": [record.name, record.nbytes, record.sha256], "tasks": {"n": step}}}

    checkpoint.write(out, step, plan, [{"reward": 0.1}] * step, parts)


def test_the_newest_whole_checkpoint_is_found_and_the_old_ones_are_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        write(tmp_path, step)
        checkpoint.prune(tmp_path, 2)
    path, found, skipped = checkpoint.newest(tmp_path, "p")
    assert found is not None
    assert path is not None
    assert (path.name, found.step, found.metrics, skipped) == ("step-10", 10, [{"reward": 0.1}] * 10, [])
    assert checkpoint.noted(path, "train 0")["tasks"] == {"n": 10}
    assert sorted(p.name for p in path.parent.iterdir()) == ["step-10", "step-2"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"reward": 0.1', '"reward": 0.9', 1))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a cut off file": (lambda c: truncate(c / "train-0.safetensors"), r"train-0.safetensors has \d+ bytes, \d+ were"),
    "a lost file": (lambda c: (c / "train-0.safetensors").unlink(), "train-0.safetensors: No such file"),
    "a cut off json": (lambda c: truncate(c / "checkpoint.json"), "checkpoint.json is cut off or not ours"),
    "another json": (lambda c: (c / "checkpoint.json").write_text("{}"), "checkpoint.json is cut off or not ours"),
    "an edited json": (lambda c: edit(c / "checkpoint.json"), "checkpoint.json is not what was written"),
    "no json": (lambda c: (c / "checkpoint.json").unlink(), "checkpoint.json: No such file"),
    "another step's": (lambda c: c.rename(c.with_name("step-4")), "it is of step 3"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_checkpoint_is_skipped_with_its_reason(how: str, tmp_path: Path) -> None:
    for step in (2, 3):
        write(tmp_path, step)
    BROKEN[how][0](tmp_path / "checkpoints" / "step-3")
    _, found, (problem,) = checkpoint.newest(tmp_path, "p")
    assert found is not None
    assert found.step == 2
    assert problem.where.startswith(str(tmp_path / "checkpoints" / "step-"))
    assert re.search(BROKEN[how][1], problem.what)


def test_a_checkpoint_of_another_plan_is_skipped_and_none_left_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 2)
    with pytest.raises(RunError, match=r"step-2: it belongs to another plan\n.*delete .* to begin again from step 0"):
        checkpoint.newest(tmp_path, "q")
    assert checkpoint.newest(tmp_path / "nothing here", "q") == (None, None, [])


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def full(folder: Path) -> dict[str, Any]:
        (folder / "half").write_text("x")
        raise RunError("cannot write the checkpoint: No space left on device")

    with pytest.raises(RunError, match="No space left"):
        checkpoint.write(tmp_path, 2, "p", [], full)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_what_a_killed_run_was_writing_is_no_checkpoint_and_is_cleared(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-2.partial").mkdir()
    assert checkpoint.newest(tmp_path, "p")[2] == []
    checkpoint.clear_partial(tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_a_broken_checkpoint_is_replaced_when_the_run_comes_there_again(tmp_path: Path) -> None:
    write(tmp_path, 1)
    truncate(tmp_path / "checkpoints" / "step-1" / "checkpoint.json")
    write(tmp_path, 1)
    assert checkpoint.newest(tmp_path, "p")[1] is not None
