"""Whoever dies, in whichever phase: the others go too, nothing is left behind, and the error says who and where.

            P1 rollout ..        P2 score, train        P3 update, publish
rollout     SIGKILL              SIGKILL                SIGKILL
train       SIGKILL              SIGKILL                SIGKILL
controller  SIGKILL              SIGKILL                SIGKILL
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from leftovers import leftovers
from processes import children
from runtime_tiny import data_dir, luck, tight_plan, tiny_plan

from rollplex.ir.errors import EngineError, RunError
from rollplex.ir.steps import Run
from rollplex.runtime.crew import child_environment
from rollplex.runtime.events import IterationDone, RunEvent, Started, StepEntered
from rollplex.runtime.nursery import nursery
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.run import execute_plan, run_plan

pytestmark = pytest.mark.alone

PHASES = ("P1", "P2", "P3")
TRAIN, ROLLOUT = ProcessId("train", 0), ProcessId("rollout", 0)


@pytest.fixture(scope="module", autouse=True)
def a_nursery_before_anything_is_counted() -> None:
    """The tests' own nursery (conftest.py) has a socket here, from the first run on."""
    with nursery(child_environment(os.environ, 1)):
        pass


class SignalIn:
    """A Progress that sends a signal to one process once it and the trainer are in a phase of the second iteration."""

    def __init__(self, victim: ProcessId, phase: str, number: signal.Signals) -> None:
        self.victim, self.phase, self.number = victim, phase, number
        self.pids: dict[ProcessId, int] = {}
        self.sent_at = 0.0
        self.entered: set[ProcessId] = set()

    def __call__(self, event: RunEvent) -> None:
        if isinstance(event, Started):
            self.pids = dict(event.pids)
        if isinstance(event, StepEntered) and self._here(event):
            self.entered.add(event.process)
        if self.entered >= {TRAIN, self.victim} and not self.sent_at:
            self.sent_at = time.monotonic()
            os.kill(self.pids[self.victim], self.number)

    def _here(self, event: StepEntered) -> bool:
        return event.iteration == 1 and event.step.window.startswith(self.phase)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", [TRAIN, ROLLOUT], ids=str)
def test_a_killed_engine_is_named_with_its_step_and_nothing_is_left(
    tmp_path: Path, victim: ProcessId, phase: str
) -> None:
    plan, out = tiny_plan(run={"steps": 3}), tmp_path / "run"
    kill = SignalIn(victim, phase, signal.SIGKILL)
    before = leftovers(tmp_path)
    with pytest.raises(EngineError) as caught:
        run_plan(plan, hosts={"reward": luck}, out_dir=out, progress=kill)
    assert time.monotonic() - kill.sent_at < 3
    message = str(caught.value)
    assert message.startswith(f"engine process: {victim} (pid {kill.pids[victim]}) was killed by SIGKILL in step `")
    assert "iteration 1" in message
    caught = message = None
    assert leftovers(tmp_path) == before
    report = json.loads((out / "report.json").read_text())
    assert report["steps_done"] == len((out / "metrics.jsonl").read_text().splitlines()) == 1
    assert report["ended"].startswith("EngineError: ")


STORE = """
import os, signal
from rollplex.runtime.optimizer import ChunkedAdam

def killed(self, work, start, stop):
    if start:
        os.kill(os.getpid(), signal.SIGKILL)
    store(self, work, start, stop)

store, ChunkedAdam.store = ChunkedAdam.store, killed
"""


def test_who_is_killed_in_a_stage_of_the_update_is_told_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer dies in its lane `store`, at its second chunk, beside whatever its other lanes are at."""
    (tmp_path / "sitecustomize.py").write_text(STORE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = r"train 0 \(pid \d+\) was killed by SIGKILL in step `update_chunk actor \d` \(.*store of chunk 1 of actor"
    with pytest.raises(EngineError, match=told + r"\b.*\), window P3 update, iteration 0"):
        run_plan(tight_plan(), hosts={"reward": luck}, out_dir=tmp_path / "run")
    assert children() == []


CONTROLLER = """
import os, signal, sys
sys.path[:0] = {path!r}
from pathlib import Path
from runtime_tiny import tiny_plan, luck
from test_runtime_death import SignalIn, TRAIN
from rollplex.runtime.events import Started
from rollplex.runtime.run import run_plan

kill = SignalIn(TRAIN, {phase!r}, signal.SIGKILL)
def progress(event):
    if isinstance(event, Started):
        print(*event.pids.values(), flush=True)
        event = Started(dict.fromkeys(event.pids, os.getpid()))
    kill(event)
run_plan(tiny_plan(run={{"steps": 3}}), hosts={{"reward": luck}}, out_dir=Path({out!r}), progress=progress)
"""


@pytest.mark.parametrize("phase", PHASES)
def test_engines_do_not_outlive_a_killed_controller(tmp_path: Path, phase: str) -> None:
    data_dir()
    here = str(Path(__file__).parent)
    code = CONTROLLER.format(path=[here, str(Path(here).parent)], phase=phase, out=str(tmp_path / "run"))
    shm = os.listdir("/dev/shm")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 3
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_runs(pid) for pid in pids)
    assert os.listdir("/dev/shm") == shm
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_socket()]
    assert not (tmp_path / "run" / "final").exists()


def _runs(pid: int) -> bool:
    """Whether a process of this pid still runs one of ours."""
    try:
        return "rollplex.runtime" in " ".join(psutil.Process(pid).cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


@pytest.mark.parametrize("victim", [TRAIN, ROLLOUT], ids=str)
def test_a_stopped_engine_is_noticed_within_silent_s(tmp_path: Path, victim: ProcessId) -> None:
    plan = tiny_plan(run={"steps": 3, "silent_s": 2})
    stop = SignalIn(victim, "P1", signal.SIGSTOP)
    with pytest.raises(EngineError, match=rf"{victim} \(pid \d+\) has said nothing for 2 s in step `.*`, window P1"):
        run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path / "run", progress=stop)
    assert 1.5 < time.monotonic() - stop.sent_at < 6
    assert children() == []


def test_the_death_of_an_engine_is_noticed_while_the_controller_is_busy(tmp_path: Path) -> None:
    pids: dict[ProcessId, int] = {}
    killed_at = 0.0

    def slow(response: str) -> float:
        nonlocal killed_at
        if not killed_at:
            killed_at = time.monotonic()
            os.kill(pids[TRAIN], signal.SIGKILL)
        time.sleep(20)
        return 0.0

    def progress(event: RunEvent) -> None:
        if isinstance(event, Started):
            pids.update(event.pids)

    with pytest.raises(EngineError, match=r"train 0 .* was killed by SIGKILL"):
        run_plan(tiny_plan(), hosts={"reward": slow}, out_dir=tmp_path / "run", progress=progress)
    assert time.monotonic() - killed_at < 3


def test_a_use_of_memory_that_is_not_mapped_is_a_named_fault(tmp_path: Path) -> None:
    """The plan unmaps the boundary before training reads it, and says nothing of reading: only the arena can tell."""
    plan = tiny_plan()
    steps = list(plan.programs["train"])
    trains = [i for i, s in enumerate(steps) if isinstance(s, Run) and s.task in ("train", "prefix_backward")]
    for i in trains:
        step = steps[i]
        assert isinstance(step, Run)
        steps[i] = step.model_copy(update={"reads": tuple(n for n in step.reads if n != "actor.boundary")})
    unmap = next(s for s in steps if s.kind == "unmap" and s.object == "actor.boundary")
    steps.remove(unmap)
    steps.insert(trains[0], unmap)
    mutated = plan.model_copy(update={"programs": {**plan.programs, "train": tuple(steps)}})

    with pytest.raises(EngineError, match=r"train 0 \(pid \d+\) was killed by SIGSEGV in step `run train actor mb 0`"):
        execute_plan(mutated, hosts={"reward": luck}, out_dir=tmp_path / "run")
    assert "Segmentation fault" in (tmp_path / "run" / "logs" / "train-0.log").read_text()


def test_a_reward_that_raises_ends_the_run_and_names_the_row(tmp_path: Path) -> None:
    def reward(row: dict[str, Any], index: int) -> float:
        if index == 1:
            raise KeyError("difficulty")
        return 0.0

    message = r"train.jsonl:\d+, response 1: `reward` raised KeyError: 'difficulty'"
    with pytest.raises(RunError, match=message):
        run_plan(tiny_plan(), hosts={"reward": reward}, out_dir=tmp_path / "run")
    assert children() == []


def test_a_full_disk_at_the_end_leaves_no_half_written_weights(tmp_path: Path) -> None:
    """The training process may write 100 kB a file from its last iteration on; the weights are larger."""
    pids: dict[ProcessId, int] = {}

    def progress(event: RunEvent) -> None:
        if isinstance(event, Started):
            pids.update(event.pids)
        if isinstance(event, IterationDone) and event.iteration == event.steps - 1:
            resource.prlimit(pids[TRAIN], resource.RLIMIT_FSIZE, (100_000, 100_000))

    with pytest.raises(RunError, match=r"train 0 .* after iteration 1: .*cannot write the weights"):
        run_plan(
            tiny_plan(run={"checkpoint_every": 0}), hosts={"reward": luck}, out_dir=tmp_path / "run", progress=progress
        )
    assert not (tmp_path / "run" / "final").exists()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
