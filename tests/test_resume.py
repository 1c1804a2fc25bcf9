"""A run that ended early goes on to the same bits as one that did not: killed, interrupted, on one rank or several.

step 0 .. 3                                         the whole run
step 0, 1, (2 dies)  --resume>  2, 3                from step-2, or from the checkpoint before if that one is broken
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from processes import children
from runtime_tiny import luck, tight_plan, tiny_job, tiny_plan

from rollplex.ir.errors import EngineError, RunError
from rollplex.ir.job import Job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes.pipeline import compile_plan
from rollplex.runtime import checkpoint
from rollplex.runtime.events import CheckpointWritten, Resumed, RunEvent, Started, StepEntered
from rollplex.runtime.preflight import make_feed
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.resume import identity, store_plan
from rollplex.runtime.run import RunResult, run_plan
from rollplex.runtime.rundir import run_directory

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("whole runs")]

TRAIN, ROLLOUT = ProcessId("train", 0), ProcessId("rollout", 0)
MEASURED = {"step_s", "rollout_tokens_per_s"}
RUN = {"steps": 4, "checkpoint_every": 1, "silent_s": 60}
CRITIC = "two copies, critic, shares, streamed"
HOST: dict[str, Any] = {"engine": "host"}
MEGATRON: dict[str, Any] = {"engine": "megatron", "tensor_parallel": 2, "sequence_parallel": False}
ROLLS = {"engine": "host", "kv_cache_gib": "1 MiB", "runtime_gib": "512 KiB"}


def plan_of(name: str, **run: Any) -> Plan:
    """One rank; two copies of policy and critic that stream and share out their updates; those of a cut model."""
    run = RUN | run
    if name == "TP 1":
        return tight_plan(run=run)
    shares: dict[str, Any] = {"distributed_optimizer": True}
    if name == CRITIC:
        roles = {"actor": {"train": HOST | shares, "rollout": ROLLS}, "reference": {"score": HOST}}
        job = tiny_job(cluster={"gpus_per_node": 2}, workload={"prompts": 4}, schedule="streamed", run=run)
        roles |= {"critic": {"train": HOST | shares}}
        job = Job.model_validate({**job.model_dump(), "roles": roles})
        return compile_plan(load_algorithm("examples/ppo.py"), job)
    roles = {"actor": {"train": MEGATRON | shares, "rollout": ROLLS}, "reference": {"score": MEGATRON}}
    cluster = {"gpus_per_node": 4, "capacity_gib": "32 MiB"}
    return tiny_plan(cluster=cluster, workload={"prompts": 4}, roles=roles, run=run)


@cache
def whole(name: str) -> RunResult:
    """A run that nothing happens to."""
    return run_plan(plan_of(name), hosts={"reward": luck}, out_dir=Path(mkdtemp()) / "run")


class Struck:
    """A Progress that kills a process in the third iteration, or asks the run to end; and what it was told."""

    def __init__(self, victim: ProcessId | None, phase: str) -> None:
        self.victim, self.phase = victim, phase
        self.pids: dict[ProcessId, int] = {}
        self.seen: list[RunEvent] = []

    def __call__(self, event: RunEvent) -> None:
        self.seen.append(event)
        if isinstance(event, Started):
            self.pids = dict(event.pids)
        here = isinstance(event, StepEntered) and event.iteration == 2 and event.step.window.startswith(self.phase)
        if here and isinstance(event, StepEntered) and event.process == (self.victim or TRAIN) and self.pids:
            number = signal.SIGKILL if self.victim else signal.SIGINT
            os.kill(self.pids[self.victim] if self.victim else os.getpid(), number)
            self.pids = {}


def resumed(name: str, out: Path, **run: Any) -> tuple[RunResult, Resumed]:
    seen: list[RunEvent] = []
    result = run_plan(plan_of(name, **run), hosts={"reward": luck}, out_dir=out, progress=seen.append, resume=True)
    return result, next(event for event in seen if isinstance(event, Resumed))


def assert_same(result: RunResult, reference: RunResult) -> None:
    """Weights, moments, rollouts, rewards and all other metrics but measured times."""
    assert result.digests == reference.digests
    written = [json.loads(line) for line in (result.out_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row.pop("iteration") for row in written] == list(range(len(reference.report.metrics)))
    for rows in (result.report.metrics, written):
        for row, wanted in zip(rows, reference.report.metrics, strict=True):
            assert {k: v for k, v in row.items() if k not in MEASURED} == {
                k: v for k, v in wanted.items() if k not in MEASURED
            }
    assert (result.final / "model.safetensors").read_bytes() == (reference.final / "model.safetensors").read_bytes()


CASES = [
    ("TP 1", ROLLOUT, "P1"),
    ("TP 1", TRAIN, "P3"),
    (CRITIC, ProcessId("train", 1), "P1 stream"),
    ("TP 2, DP 2, shares", ProcessId("train", 3), "P3"),
]


@pytest.mark.parametrize(("name", "victim", "phase"), CASES)
def test_after_a_death_the_run_goes_on_to_the_same_bits(
    name: str, victim: ProcessId, phase: str, tmp_path: Path
) -> None:
    out, struck = tmp_path / "run", Struck(victim, phase)
    with pytest.raises(EngineError, match=f"{victim} .* was killed by SIGKILL"):
        run_plan(plan_of(name), hosts={"reward": luck}, out_dir=out, progress=struck)
    result, told = resumed(name, out)
    assert (told.step, told.skipped) == (2, ())
    assert_same(result, whole(name))
    assert result.report.memory_as_planned
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-3", "step-4"]
    assert {p.name for p in out.glob("trace*")} == {"trace.json", "trace-from-2.json"}


def test_an_interrupted_run_is_saved_and_may_be_given_more_steps_and_a_broken_checkpoint_is_told(
    tmp_path: Path,
) -> None:
    """SIGINT in the third of 3 steps, checkpoints every 2: step-2, and step-3 at the end; step-3 is cut off."""
    out, struck = tmp_path / "run", Struck(None, "P1")
    plan = plan_of("TP 1", steps=3, checkpoint_every=2)
    first = run_plan(plan, hosts={"reward": luck}, out_dir=out, progress=struck)
    assert (first.report.ended, first.report.steps_done) == ("interrupted", 3)
    assert [event.step for event in struck.seen if isinstance(event, CheckpointWritten)] == [2, 3]
    path = out / "checkpoints" / "step-3" / "train-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    result, told = resumed("TP 1", out, checkpoint_every=2)
    assert told.step == 2
    assert [problem.what.partition(" has ")[0] for problem in told.skipped] == ["train-0.safetensors"]
    assert_same(result, whole("TP 1"))
    assert children() == []


# ---- what is refused, before any process starts


def began(out: Path, plan: Plan) -> None:
    out.mkdir(exist_ok=True)
    store_plan(out, plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"lr": 0.5}}, r"optimizer\.lr is 0\.5, the run began with 0\.001"),
        ({"run": {"seed": 4}}, r"run\.seed is 4, the run began with 0"),
        ({"schedule": "serial"}, r"schedule is 'serial', the run began with 'rollplex'"),
        ({"workload": {"group": 4, "prompts": 4}}, r"workload\.prompts is 4, .* with 2; workload\.group is 4"),
    ],
)
def test_another_job_is_refused_with_what_differs(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    began(tmp_path, tiny_plan())
    other = tiny_plan(**changes)
    with pytest.raises(RunError, match=f"the run in this directory is another one: .*{message}"):
        run_plan(other, hosts={"reward": luck}, out_dir=tmp_path, resume=True)


def test_another_plan_of_the_same_job_is_refused(tmp_path: Path) -> None:
    plan = tiny_plan()
    began(tmp_path, plan.model_copy(update={"algorithm": "other.py:grpo"}))
    with pytest.raises(RunError, match="another one: algorithm of the plan differs"):
        run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path, resume=True)


def test_how_long_how_patient_and_how_often_saved_make_no_other_run() -> None:
    changed = {
        "steps": 9, "silent_s": 3, "step_timeout_s": 0, "checkpoint_every": 5, "checkpoints_kept": 7,
        "reward_timeout_s": 1, "reward_workers": 2, "reward_failure": 0.0, "when_short": "stop", "wandb": "x",
    }  # fmt: skip
    assert identity(tiny_plan(run=changed)) == identity(tiny_plan())
    assert identity(tiny_plan(run={"threads": 2})) != identity(tiny_plan())


def test_a_plan_is_the_same_after_it_was_run() -> None:
    """Transformers completes the configs that it is given in place."""
    plan = tiny_plan(run={"steps": 7})
    before = identity(plan)
    make_feed(plan, Job.model_validate(plan.job), {"reward": luck})
    assert identity(plan) == before


def test_fewer_steps_than_are_done_are_refused(tmp_path: Path) -> None:
    plan = tiny_plan(run={"steps": 2})
    began(tmp_path, plan)
    checkpoint.write(tmp_path, 3, identity(plan), [], lambda folder: {})
    with pytest.raises(RunError, match=r"run\.steps: the run has done 3 steps, .* for 2\n.*--steps 3 or more"):
        run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path, resume=True)


def test_only_broken_checkpoints_are_refused_with_what_to_do(tmp_path: Path) -> None:
    plan = tiny_plan()
    began(tmp_path, plan)
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    with pytest.raises(RunError, match=r"step-1: checkpoint\.json: No such file .*\n.*begin again from step 0"):
        run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path, resume=True)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunError, match=r"not the directory of a run: it has no plan\.json, and holds thesis\.tex"):
        run_plan(tiny_plan(), hosts={"reward": luck}, out_dir=tmp_path, resume=True)


# ---- one run a directory


def test_a_directory_in_use_is_refused_with_the_process_that_uses_it(tmp_path: Path) -> None:
    message = rf"another run is using this directory \(pid {os.getpid()}\)"
    with run_directory(tmp_path / "run"), pytest.raises(RunError, match=message):
        run_plan(tiny_plan(), hosts={"reward": luck}, out_dir=tmp_path / "run", resume=True)


def test_the_lock_of_a_dead_run_is_taken_over(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from rollplex.runtime.rundir import run_directory\n"
    code += "with run_directory(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "run" / ".lock").exists()
    with run_directory(tmp_path / "run", resume=True):
        pass
