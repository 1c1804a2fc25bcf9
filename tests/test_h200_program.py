"""The program of the H200s' page on engines of a host: parts run, fail, are left for a later command, and hang."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from h200_runs import HOSTS, Counted, two_gpu_plan, write_plans
from runtime_tiny import tiny_plan

from benchmarks.h200 import parts, running, table
from benchmarks.h200.exchange import ended
from benchmarks.h200.parts import Part
from benchmarks.h200.plans import HERE, ROOT
from benchmarks.h200.running import Whereabouts, called, devices, run, stacks, watchdogs
from benchmarks.h200.state import Done, State
from rollplex.ir.errors import RunError
from rollplex.ir.steps import Barrier
from rollplex.runtime.events import StageBegun, StepEntered
from rollplex.runtime.protocol import ProcessId

MOST = 1 << 40


def asked(folder: Path, tmp_path: Path, *options: str) -> argparse.Namespace:
    words = [str(folder), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "page.md"), *options]
    return table.parser().parse_args(words)


def on_host(folder: Path, tmp_path: Path, *options: str) -> int:
    """The program under a driver that counts a byte."""
    return table.work(asked(folder, tmp_path, *options), Counted, lambda: "a host")


def page_of(tmp_path: Path) -> str:
    return (tmp_path / "page.md").read_text(encoding="utf-8")


# ---- a whole page


@pytest.mark.processes
def test_two_gpus_from_plans_to_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan runs at TP 2 to 1, and a soak; what needs a GPU fails as parts of their own, and the page says so.

    A second command runs none of them again; with a gap that nothing can hold it says what does not hold.
    """
    soak = tiny_plan(run={"steps": 2, "checkpoint_every": 0, "hosts": HOSTS})
    folder = write_plans(tmp_path / "plans", **{"1_rollplex,_MPS_default": two_gpu_plan(), "soak": soak})
    assert on_host(folder, tmp_path) == table.WRONG
    text, lines = page_of(tmp_path), page_of(tmp_path).splitlines()
    assert capsys.readouterr().out == text
    assert lines[0] == "a host"
    rows = [line for line in lines if line.startswith("| rollplex, MPS default | ")]
    assert len(rows) == 1 + 2  # schedules, and memory of two GPUs
    cells = [cell.strip() for cell in rows[0].split("|")]
    sent = two_gpu_plan().summary.layout.exchange_bytes_per_gpu
    assert re.fullmatch(r"[\d.e-]+ \(3\)", cells[15]), "the last gap is behind three updates"
    assert cells[17] == f"{sent / 1e6:.0f}"
    assert float(cells[18]) > 0
    assert [row.split("|")[2].strip() for row in rows[1:]] == ["0", "1"]
    assert all(row.endswith("| 0 |") for row in rows[1:])
    assert "Windows of rollplex, MPS default:" in lines
    assert "2 of 2 steps, training at TP 1, rollout at TP 1 x 1, sharing mps: step" in text
    failed = [line.partition(" FAILED")[0] for line in lines if " FAILED" in line]
    assert failed == ["exchange", "optimizer stream"]
    assert lines[-1].endswith("second copy 0 bytes; 2 steps, no hang; 2 DO NOT HOLD, above")

    began = json.loads((tmp_path / "runs" / "state.json").read_text())
    assert on_host(folder, tmp_path, "--gap=-1") == table.WRONG
    assert json.loads((tmp_path / "runs" / "state.json").read_text()) == began
    told = re.findall(
        r"^step (\d) of (.*): trainer and rollout engine are .* nats apart, over -1$", page_of(tmp_path), re.M
    )
    assert told == [*((str(n), "rollplex, MPS default") for n in (1, 2, 3, 4)), ("1", "soak"), ("2", "soak")]

    gpu, window = began["parts"]["1 rollplex, MPS default"]["found"]["gpus"][1], two_gpu_plan().summary.windows[-1]
    gpu["driven"][window.name] = window.hbm_bytes * 106 // 100
    (tmp_path / "runs" / "state.json").write_text(json.dumps(began))
    assert on_host(folder, tmp_path) == table.WRONG
    assert f"rollplex, MPS default: GPU 1 has 0.00 GiB in use in {window.name}, 6.0% over" in page_of(tmp_path)
    assert page_of(tmp_path).endswith("3 DO NOT HOLD, above\n")


# ---- parts one after the other


def faked(monkeypatch: pytest.MonkeyPatch, **measures: Callable[[], Any]) -> list[str]:
    """Parts `a`, `b`, .. of kind `publication`, each expected to take 60 s; names of those that are measured."""
    ran: list[str] = []

    def noted(name: str, measure: Callable[[], Any]) -> Any:
        ran.append(name)
        return measure()

    made = [Part(n, "publication", n, 60.0, lambda n=n, m=m: noted(n, m)) for n, m in measures.items()]
    monkeypatch.setattr(table, "parts_of", lambda *a: iter(made))
    monkeypatch.setattr(table, "prepare", lambda *a: [])
    return ran


def published() -> dict[str, float]:
    return {"nbytes": 10, "rebuilt": 1, "in_place": 0.001, "gather": 0.002, "load": 0.003}


def broken() -> None:
    raise RunError("no room", where="GPU")


def test_what_a_command_leaves_the_next_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit with room for none, for one by the estimate, for all by what the first took; a part asked for again."""
    ran = faked(monkeypatch, a=published, b=published)
    assert on_host(tmp_path, tmp_path, "--limit", "59") == table.LEFT
    assert ran == []
    assert "Not run yet: a; b." in page_of(tmp_path)
    assert on_host(tmp_path, tmp_path, "--limit", "61") == 0  # a takes no time, and b is then expected to
    assert ran == ["a", "b"]
    assert "Not run yet" not in page_of(tmp_path)
    assert on_host(tmp_path, tmp_path, "--again", "b") == 0
    assert ran == ["a", "b", "b"]
    with pytest.raises(RunError, match="--again: there is no part `c`\n    try: one of a, b"):
        on_host(tmp_path, tmp_path, "--again", "c")


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told with its reason, is in the last line and the exit status, and is run again only where asked for."""
    ran = faked(monkeypatch, a=broken, b=published)
    assert on_host(tmp_path, tmp_path) == table.WRONG
    assert "\na FAILED: GPU: no room\n" in page_of(tmp_path)
    assert page_of(tmp_path).endswith("gather and load 5.0 ms; 1 DO NOT HOLD, above\n")
    faked(monkeypatch, a=published, b=published)
    assert on_host(tmp_path, tmp_path) == table.WRONG
    assert on_host(tmp_path, tmp_path, "--again", "a") == 0
    assert ran == ["a", "b"]


def test_a_part_that_breaks_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody thought of is told by its kind; the page is written where no folder was."""

    def odd() -> None:
        raise KeyError("prefix_s")

    ran = faked(monkeypatch, a=odd, b=published)
    page = tmp_path / "new" / "folder" / "page.md"
    assert on_host(tmp_path, tmp_path, "--out", str(page)) == table.WRONG
    assert ran == ["a", "b"]
    assert "\na FAILED: KeyError: 'prefix_s'\n" in page.read_text()


def test_a_page_of_what_is_measured_needs_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state was carried to a machine without one: nothing is left to measure there, or it is said what lacks."""

    def gone() -> str:
        raise RunError("nvidia-smi does not answer", where="GPU")

    faked(monkeypatch, a=published)
    assert on_host(tmp_path, tmp_path) == 0
    text = page_of(tmp_path)
    assert table.work(asked(tmp_path, tmp_path), Counted, gone) == 0
    assert page_of(tmp_path) == text
    with pytest.raises(RunError, match="GPU: nvidia-smi does not answer"):
        table.work(asked(tmp_path, tmp_path, "--again", "a"), Counted, gone)


def test_a_part_that_was_cut_off_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends in the middle of a part: what was before it stays."""

    def cut() -> None:
        raise KeyboardInterrupt

    ran = faked(monkeypatch, a=published, b=cut)
    with pytest.raises(KeyboardInterrupt):
        on_host(tmp_path, tmp_path)
    assert "Not run yet: b." in page_of(tmp_path)
    again = faked(monkeypatch, a=published, b=published)
    assert on_host(tmp_path, tmp_path) == 0
    assert (ran, again) == (["a", "b"], ["b"])


def test_a_plan_that_was_compiled_anew_is_run_anew() -> None:
    state = State(parts={"0 serial": Done("plan", "abc", 80.0)})
    assert state.has("0 serial", "abc")
    assert not state.has("0 serial", "abd")
    assert not state.has("1 rollplex", "abc")
    assert (state.expected("plan", 110.0), state.expected("soak", 330.0)) == (100.0, 330.0)


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    for text in ("[1]", "{", '{"heading": "", "parts": {"a": {"seconds": 1}}}'):
        file.write_text(text)
        with pytest.raises(RunError, match=r"it does not hold what an earlier command measured: (?s:.)*--runs"):
            State.read(file)


def test_calibration_is_a_part_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rollplex calibrate` is called with the seconds; its file is on the page, beside that of one GPU."""
    calls: list[list[str]] = []
    one = (HERE / "h200_3b.json").read_text(encoding="utf-8")

    def called(command: list[str], log: Path, limit_s: float) -> None:
        assert limit_s == 3 * (130 + 100)
        calls.append(command)
        Path(command[command.index("--out") + 1]).write_text(one)

    monkeypatch.setattr(parts, "called", called)
    monkeypatch.setattr(table, "prepare", lambda *a: [])
    job = HERE / "job_3b_x2.yaml"
    assert on_host(tmp_path, tmp_path, "--calibrate", str(job), "--seconds", "130") == 0
    into = str(tmp_path / "runs" / "calibration.json")
    assert calls == [["rollplex.cli", "calibrate", str(job), "--out", into, "--seconds", "130"]]
    assert "| batch | TP 1 to 1: alone, ms | 32 SMs | 64 SMs | 80 SMs | 96 SMs | MPS default | TP 1" in page_of(
        tmp_path
    )
    assert on_host(tmp_path, tmp_path) == 0
    assert len(calls) == 1
    assert "| batch | TP 1 to 1: alone, ms |" in page_of(tmp_path)  # a later command does not ask for it again
    with pytest.raises(RunError, match=r"--calibrate .*no\.yaml: there is no such job"):
        on_host(tmp_path, tmp_path, "--calibrate", str(tmp_path / "no.yaml"))


# ---- one run


@pytest.mark.processes
def test_a_run_that_hangs_says_where_everyone_waited(tmp_path: Path) -> None:
    """A reward that never answers: what the runtime says of it, then a line a process with the step that it is in."""
    host = tmp_path / "slow.py"
    host.write_text("import time\ndef reward(response):\n    time.sleep(600)\n")
    options = {
        "step_timeout_s": 3,
        "reward_timeout_s": 500,
        "checkpoint_every": 0,
        "hosts": {"reward": f"{host}:reward"},
    }
    folder = write_plans(tmp_path, soak=tiny_plan(run=options))
    with pytest.raises(RunError) as caught:
        run("soak", folder / "soak.json", tmp_path / "out", Counted)
    lines = str(caught.value).splitlines()
    assert "python -m benchmarks.h200.running: controller: controller 0 has been at it for 3 s in step `" in lines[0]
    for process in ("controller 0", "train 0", "rollout 0"):
        told = [line for line in lines if line.startswith(f"{process}: step `")]
        assert len(told) == 1
        assert re.search(r", window P\d .*, step 1 of the run, for \d+\.\d s$", told[0])
    for rank in ("train", "rollout"):  # the controller, which calls the reward, says its own
        assert any(re.match(rf"{rank}-0\.log: .* < run_iteration executor\.py:\d+ < ", line) for line in lines)
    assert lines[-1] == f"    try: look at {tmp_path / 'out.log'}"


def test_what_a_process_began_last_is_where_it_is() -> None:
    now = 10.0
    heard, train = Whereabouts(lambda: now), ProcessId("train", 1)
    heard(StageBegun(train, "taking memory"))
    now = 12.5
    assert list(heard.lines()) == ["train 1: taking memory, for 2.5 s"]
    heard(StageBegun(train, ""))
    heard(StepEntered(train, 57, Barrier(kind="barrier", window="P1 decode", name="rollout")))
    now = 72.5
    told = "train 1: step `barrier rollout`, window P1 decode, step 58 of the run, for 60.0 s"
    assert list(heard.lines()) == [told]


def test_a_program_that_fails_is_told_by_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a traceback the error, of a message its last paragraph; of nothing its exit status."""
    broken = "print('much')\nprint()\nraise ValueError('no\\n    more')"
    for name, text in (
        ("broken", broken),
        ("mute", "raise SystemExit(3)"),
        ("plain", "raise SystemExit('a\\n\\nb\\nc')"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = {"broken": "ValueError: no\n    more", "mute": "it says nothing, and exits with status 3", "plain": "b\nc"}
    for name, what in told.items():
        with pytest.raises(RunError) as caught:
            called([name], tmp_path / f"{name}.log")
        assert str(caught.value) == f"python -m {name}: {what}\n    try: look at {tmp_path / name}.log"


def test_a_program_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is interrupted and says its last words; one that does not hear is killed; both with what they have started."""
    hears = "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's & does not
    (tmp_path / "slow.py").write_text(
        f"{hears}try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    raise SystemExit('my last words')\n"
    )
    (tmp_path / "deaf.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(running, "ENDING_S", 1.0)
    for name, said in (("slow", "my last words"), ("deaf", "it says nothing")):
        began = time.monotonic()
        with pytest.raises(RunError) as caught:
            called([name], tmp_path / f"{name}.log", 1.5)
        told = f"python -m {name}: it has not ended for 1.5 s\n{said}\n    try: look at {tmp_path / name}.log"
        assert str(caught.value) == told
        assert time.monotonic() - began < 20


def test_a_rank_that_fails_ends_the_exchange_at_once() -> None:
    """The other one would wait in a collective; both that go on are given up, and those that succeed are fine."""

    def ranks(*programs: str) -> list[subprocess.Popen[str]]:
        return [subprocess.Popen([sys.executable, "-c", program], text=True) for program in programs]

    waits, began = "import time; time.sleep(60)", time.monotonic()
    for programs, limit_s, told in (
        ((waits, "raise SystemExit(3)"), 60.0, r"a rank has failed: \[None, 3\]"),
        ((waits, "pass"), 1.0, r"a rank has not ended for 1 s: \[None, 0\]"),
    ):
        started = ranks(*programs)
        with pytest.raises(SystemExit, match=told):
            ended(started, limit_s)
        for process in started:
            process.kill()
            process.wait()
    ended(ranks("pass", "pass"))
    assert time.monotonic() - began < 30


def test_programs_find_this_checkout_wherever_they_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that came by copy is installed nowhere, and engines are started with no look at the directory."""
    (tmp_path / "seen.py").write_text("import os, sys\nsys.exit(os.environ['PYTHONPATH'])\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(RunError) as caught:
        called(["seen"], tmp_path / "seen.log")
    assert str(caught.value).startswith(f"python -m seen: {ROOT}\n")


def test_a_watchdog_names_the_collective(tmp_path: Path) -> None:
    work = "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=60000)"
    (tmp_path / "train-0.log").write_text(f"..\n[Rank 0] Watchdog caught a timeout: {work} ran for 60012 ms (why)\n")
    (tmp_path / "rollout-0.log").write_text("fine\n")
    assert list(watchdogs(tmp_path)) == [f"train-0.log: {work}"]


def test_the_stacks_of_a_rank_are_told_from_the_innermost_call(tmp_path: Path) -> None:
    """Two dumps of a real process that waits in its first thread and has another: the last one's first thread."""
    program = (
        "import faulthandler, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n"
        "def inner():\n    faulthandler.dump_traceback()\n"
        "def outer():\n    inner()\n"
        "faulthandler.dump_traceback()\nouter()\n"
    )
    (tmp_path / "rank.py").write_text(program)
    with (tmp_path / "train-1.log").open("w") as log:
        subprocess.run([sys.executable, str(tmp_path / "rank.py")], stderr=log, check=True, timeout=60)
    (tmp_path / "train-0.log").write_text("nothing of the kind\n")
    assert list(stacks(tmp_path)) == ["train-1.log: inner rank.py:4 < outer rank.py:6 < <module> rank.py:8"]


def test_the_plan_says_which_devices_are_watched() -> None:
    """`run.devices`: rank 0 on the third CUDA device, rank 1 on the second; or both on one."""
    assert devices(two_gpu_plan()) == {0: [0], 1: [1]}
    assert devices(two_gpu_plan(devices=(2, 1))) == {2: [0], 1: [1]}
    assert devices(two_gpu_plan(devices=(1, 1))) == {1: [0, 1]}
