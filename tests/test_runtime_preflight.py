"""What a user can get wrong is refused before any process starts, with where, what and a way out; never a traceback."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_tiny import luck, tiny_job, tiny_plan
from safetensors.torch import save_file

from rollplex.ir.errors import DataError, JobError, PlanError, RollplexError, RunError
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Rebuild
from rollplex.ir.tensors import model_tensors
from rollplex.runtime.crew import Crew
from rollplex.runtime.feed import Feed
from rollplex.runtime.openfiles import WANTED, raise_limit
from rollplex.runtime.preflight import check_machine, make_feed
from rollplex.runtime.run import execute_plan, run_plan
from rollplex.runtime.rundir import run_directory


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Crew, process: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(Crew, "_start", start)


def refused(plan: Plan, error: type[RollplexError], match: str, out: Path, hosts: dict[str, Any] | None = None) -> None:
    with pytest.raises(error, match=match):
        run_plan(plan, hosts={"reward": luck} if hosts is None else hosts, out_dir=out)


# ---- the plan


def test_an_infeasible_plan(tmp_path: Path) -> None:
    plan = tiny_plan(cluster={"capacity_gib": "1 MiB"})
    refused(plan, RunError, r"the plan does not fit: HBM is .* KiB short in window P1 ", tmp_path / "r")


def test_another_backend(tmp_path: Path) -> None:
    plan = tiny_plan()
    rollout = plan.processes["rollout"].model_copy(update={"engine": "fsdp"})
    plan = plan.model_copy(
        update={"processes": {**plan.processes, "rollout": rollout}, "not_executable": ("engine fsdp",)}
    )
    refused(plan, RunError, r"backend fsdp is not implemented yet for run \(rollout\)", tmp_path / "r")
    refused(plan, RunError, r"no backend executes this plan: engine fsdp", tmp_path / "r")


def test_a_model_cut_over_ranks_is_not_for_the_host_backend(tmp_path: Path) -> None:
    plan = tiny_plan()
    train = plan.processes["train"].model_copy(update={"ranks": 2, "tensor_parallel": 2})
    plan = plan.model_copy(update={"processes": {**plan.processes, "train": train}})
    refused(plan, RunError, r"backend host trains whole models, the plan cuts them over 2 ranks", tmp_path / "r")


def test_a_step_the_host_backend_does_not_have(tmp_path: Path) -> None:
    plan = tiny_plan()
    train = (*plan.programs["train"], Rebuild(window="P3 publish", object="actor.case3"))
    plan = plan.model_copy(update={"programs": {**plan.programs, "train": train}})
    refused(plan, RunError, r"backend host does not execute `rebuild actor.case3` \(train\)", tmp_path / "r")


def test_a_plan_that_the_checker_refuses(tmp_path: Path) -> None:
    plan = tiny_plan()
    plan = plan.model_copy(update={"programs": {**plan.programs, "train": plan.programs["train"][:-1]}})
    refused(plan, PlanError, "published", tmp_path / "r")


def test_a_dtype_that_the_host_backend_does_not_compute_in(tmp_path: Path) -> None:
    plan = tiny_plan(model={"dtype": "bfloat16"})
    message = r"model.dtype: backend host computes in float32 or float64, not in bfloat16"
    refused(plan, RunError, message, tmp_path / "r")


def test_a_pool_whose_places_reach_beyond_its_share(tmp_path: Path) -> None:
    """Windows fit, and one place after the other does not: told before a process has locked anything."""
    plan = tiny_plan()
    summary = plan.summary.model_copy(update={"host_capacity_bytes": plan.summary.host_pool.bytes - 4096})
    narrow = plan.model_copy(update={"summary": summary})
    with pytest.raises(
        RunError, match=r"host memory: the pinned pool .*4.0 KiB more than its share .*\n.*cluster.pinned_share"
    ):
        check_machine(narrow)


def test_a_process_may_have_as_many_files_open_as_its_hard_limit_lets_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(WANTED, before[1]), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_machine_with_too_little_memory(tmp_path: Path) -> None:
    plan = tiny_plan()
    plan = plan.model_copy(update={"summary": plan.summary.model_copy(update={"peak_hbm_bytes": 1 << 50})})
    with pytest.raises(RunError, match=r"host memory: the run needs 1024.0 TiB of memory .* this machine has .* free"):
        execute_plan(plan, hosts={"reward": luck}, out_dir=tmp_path / "r")


# ---- host functions


def test_a_missing_host_function(tmp_path: Path) -> None:
    refused(tiny_plan(), RunError, r"no function for `reward`\n    try: ", tmp_path / "r", hosts={})


def test_a_host_function_with_a_parameter_that_nobody_offers(tmp_path: Path) -> None:
    def reward(question: str, completion: str) -> float:
        return 0.0

    message = (
        r"`reward` takes completion, which no row offers\n    try: .* question, answer, response, row, tokens, index"
    )
    refused(tiny_plan(), RunError, message, tmp_path / "r", hosts={"reward": reward})


# ---- data and weights


def write_rows(folder: Path, *rows: dict[str, Any] | str) -> str:
    file = folder / "train.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(file)


def test_data_that_is_not_there(tmp_path: Path) -> None:
    plan = tiny_plan(run={"data": str(tmp_path / "none.jsonl")})
    refused(plan, DataError, r"none.jsonl: cannot read the data set: No such file", tmp_path / "r")
    refused(tiny_plan(run={"data": None}), RunError, r"run.data: the job names no data", tmp_path / "r")


def test_an_empty_data_set(tmp_path: Path) -> None:
    refused(tiny_plan(run={"data": write_rows(tmp_path)}), DataError, "the data set is empty", tmp_path / "r")


def test_rows_and_videos_that_cannot_be_used_are_told_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "broken.mp4").write_bytes(b"this is no video")
    rows = (
        {"video": "broken.mp4", "question": "?", "answer": "a"},
        "{",
        {"video": "gone.mp4", "question": "?", "answer": "a"},
    )
    plan = tiny_plan(run={"data": write_rows(tmp_path, *rows)})
    with pytest.raises(DataError) as caught:
        run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path / "r")
    message = str(caught.value)
    assert all(f"train.jsonl:{line}: " in message for line in (1, 2, 3))
    assert "broken.mp4" in message
    assert "gone.mp4 does not exist" in message


def test_weights_that_are_not_there_or_of_another_model(tmp_path: Path) -> None:
    plan = tiny_plan(run={"weights": str(tmp_path)})
    refused(plan, JobError, r"no \*.safetensors here", tmp_path / "r")
    tensors = {t.name: torch.zeros(t.shape) for t in model_tensors(tiny_job().spec)}
    tensors["lm_head.weight"] = torch.zeros(3, 32)
    del tensors["model.language_model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(JobError) as caught:
        run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path / "r")
    assert "no weight model.language_model.norm.weight" in str(caught.value)
    assert "lm_head.weight is [3, 32], the model needs [264, 32]" in str(caught.value)
    (tmp_path / "model.safetensors").write_bytes(b"\x10")
    refused(plan, JobError, "cannot read the weights", tmp_path / "r")


def test_a_model_that_is_only_a_name(tmp_path: Path) -> None:
    plan = tiny_plan()
    job = {**plan.job, "model": {**plan.job["model"], "name": "qwen2.5-vl-3b", "config": None}}
    with pytest.raises(JobError, match=r"model.name: the model qwen2.5-vl-3b is known by its sizes only"):
        execute_plan(plan.model_copy(update={"job": job}), hosts={"reward": luck}, out_dir=tmp_path / "r")


# ---- the directory


def test_a_directory_in_use(tmp_path: Path) -> None:
    with run_directory(tmp_path / "r"):
        refused(tiny_plan(), RunError, "another run is using this directory", tmp_path / "r")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tiny_plan(), RunError, "cannot make the run directory: ", tmp_path / "file" / "r")


def test_a_refused_run_leaves_the_directory_usable(tmp_path: Path) -> None:
    refused(tiny_plan(run={"data": None}), RunError, "names no data", tmp_path / "r")
    with run_directory(tmp_path / "r"):
        pass


# ---- the feed


def feed(**run: Any) -> Feed:
    job = tiny_job(run=run)
    return make_feed(tiny_plan(run=run), job, {"reward": luck})


def test_every_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    made = feed()
    steps = [[row.id for row in made.rows_of(i)] for i in range(12)]
    epochs = [[row for step in steps[i : i + 6] for row in step] for i in (0, 6)]
    assert len(made.rows) == 12
    assert all(sorted(epoch) == sorted(row.id for row in made.rows) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [row.id for row in feed(seed=5).rows_of(0)] != steps[0] or [r.id for r in feed(seed=5).rows_of(1)] != steps[
        1
    ]


def test_a_prompt_longer_than_the_plan_allows_names_its_row(tmp_path: Path) -> None:
    rows = [{"question": "why? " * 60, "answer": "a"}]
    made = feed(data=write_rows(tmp_path, *rows))
    made.begin(0)
    with pytest.raises(DataError, match=r"train.jsonl:1: the prompt has \d+ tokens, the plan allows 128"):
        made._load()
