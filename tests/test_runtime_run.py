"""Whole runs on real processes: the same bits under every schedule and residency, and the bytes that were planned."""

from __future__ import annotations

import json
import os
import signal
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from perfetto import dropped
from processes import children
from runtime_tiny import luck, tight_plan, tiny_plan

from rollplex.ir.errors import RunError
from rollplex.ir.steps import Wait
from rollplex.runtime.events import IterationDone, RunEvent, StepEntered, Stopping
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.run import RunResult, run_plan

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("five steps")]

TRAIN, ROLLOUT = ProcessId("train", 0), ProcessId("rollout", 0)
FIVE = {"steps": 5}


@cache
def five_steps(name: str) -> RunResult:
    plan = tight_plan(run=FIVE) if name == "tight" else tiny_plan(run=FIVE, schedule=name)
    return run_plan(plan, hosts={"reward": luck}, out_dir=Path(mkdtemp()) / "run")


def test_five_steps_serial_and_rollplex_are_identical_to_the_bit() -> None:
    serial, rollplex = five_steps("serial"), five_steps("rollplex")
    assert set(serial.digests) == {
        "actor.snapshot", "actor.vision", "actor.master", "actor.exp_avg", "actor.exp_avg_sq", "rollouts",
    }  # fmt: skip
    assert serial.digests == rollplex.digests
    assert [row["loss"] for row in serial.report.metrics] == [row["loss"] for row in rollplex.report.metrics]


def test_streaming_and_offloading_change_no_bit() -> None:
    assert five_steps("tight").digests == five_steps("rollplex").digests


def test_another_seed_gives_other_bits() -> None:
    plan = tiny_plan(run={"steps": 1, "seed": 7})
    other = run_plan(plan, hosts={"reward": luck}, out_dir=Path(mkdtemp()) / "run")
    assert other.digests["rollouts"] != five_steps("rollplex").digests["rollouts"]


@pytest.mark.parametrize("name", ["serial", "rollplex", "tight"])
def test_every_object_in_every_window_has_the_bytes_of_the_plan(name: str) -> None:
    report = five_steps(name).report
    assert [row for row in report.objects if not row.as_planned] == []
    assert [(row.window, row.planned) for row in report.memory] == [(row.window, row.measured) for row in report.memory]
    temporaries = [row for row in report.objects if row.temporary and row.measured]
    assert {row.object for row in temporaries} == {row.object for row in report.objects if row.temporary}


def test_both_engines_hold_the_same_physical_pages() -> None:
    facts = five_steps("rollplex").facts
    assert facts[TRAIN]["inodes"] == facts[ROLLOUT]["inodes"]
    assert set(facts[TRAIN]["inodes"]) == {"actor.snapshot", "actor.vision"}


def test_prefixes_run_inside_the_decode_window_only_under_rollplex() -> None:
    assert five_steps("rollplex").report.overlap.hidden_s > 0
    assert five_steps("serial").report.overlap.hidden_s == 0


def test_a_run_leaves_its_report_its_trace_and_weights_that_transformers_loads() -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    result = five_steps("rollplex")
    out = result.out_dir
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    assert all({"reward", "loss", "grad_norm", "step_s", "response_tokens"} <= row.keys() for row in rows)
    report = json.loads((out / "report.json").read_text())
    assert (report["steps_done"], report["ended"], report["memory_as_planned"]) == (5, "complete", True)
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(str(result.final))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not list(out.glob("*.partial"))


def test_the_trace_has_a_slice_for_every_step_of_every_process() -> None:
    result = five_steps("rollplex")
    events = json.loads((result.out_dir / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"controller 0", "train 0", "rollout 0"}
    plan = tiny_plan(run=FIVE)
    slices = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert len(slices) == 5 * sum(len(program) for program in plan.programs.values())
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in slices)
    instants = [e["name"] for e in events if e["ph"] == "i"]
    assert instants == ["rollout-complete", "theta-quiet", "published"] * 5
    waits = [s.event for program in plan.programs.values() for s in program if isinstance(s, Wait)]
    assert len([e for e in events if e["ph"] == "f"]) == 5 * len(waits)
    assert dropped(events) == []


def test_sigint_ends_the_run_after_its_step_with_everything_written(tmp_path: Path) -> None:
    seen: list[RunEvent] = []

    def progress(event: RunEvent) -> None:
        seen.append(event)
        if isinstance(event, StepEntered) and event.process == TRAIN and event.iteration == 1 and not stopping():
            os.kill(os.getpid(), signal.SIGINT)

    def stopping() -> bool:
        return any(isinstance(event, Stopping) for event in seen)

    plan = tiny_plan(run={"steps": 50})
    result = run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path / "run", progress=progress)
    assert result.report.ended == "interrupted"
    assert result.report.steps_done == len([e for e in seen if isinstance(e, IterationDone)]) == 2
    assert (result.final / "model.safetensors").exists()
    assert children() == []


def test_a_second_sigint_ends_the_run_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    def progress(event: RunEvent) -> None:
        if isinstance(event, StepEntered) and event.process == TRAIN and event.iteration == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_plan(tiny_plan(run={"steps": 50}), hosts={"reward": luck}, out_dir=tmp_path / "run", progress=progress)
    assert children() == []
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["steps_done"], report["ended"][:17]) == (1, "KeyboardInterrupt")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_run_on_a_used_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(RunError, match=r"the run directory is not empty: it holds metrics.jsonl"):
        run_plan(tiny_plan(), hosts={"reward": luck}, out_dir=tmp_path)
