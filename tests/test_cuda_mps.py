"""The MPS daemon: ours comes and goes, a user's is respected, its clients are seen, a missing program is said so."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rollplex.backends.cuda import mps as mps_module
from rollplex.backends.cuda.mps import CONTROL, PIPE, SHARE, Mps
from rollplex.ir.errors import EngineError

on_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and shutil.which(CONTROL)), reason="needs an NVIDIA GPU and its MPS"
)
CLIENT = "import torch, time; torch.zeros(1, device='cuda'); print('ready', flush=True); time.sleep(60)"


def client(mps: Mps, share: int | None = None) -> subprocess.Popen[str]:
    env = {**os.environ, **mps.environment(share)}
    process = subprocess.Popen([sys.executable, "-c", CLIENT], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_machine_without_the_daemon_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv(PIPE, "/nowhere")
    with pytest.raises(EngineError, match=f"{CONTROL} is not installed") as error, Mps.running():
        pass
    assert "only take turns" in str(error.value)


def test_a_share_is_a_part_of_the_gpu() -> None:
    mps = Mps(Path("/pipe"), log="", owned=False)
    assert mps.environment() == {PIPE: "/pipe"}
    assert mps.environment(60) == {PIPE: "/pipe", SHARE: "60"}
    with pytest.raises(AssertionError, match="a share of 0 percent"):
        mps.environment(0)


def test_our_daemon_has_all_gpus_whichever_its_clients_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under the variable it would number GPUs anew: clients that ask for GPU 2 by that number would find none."""
    told: list[str | None] = []

    def run(
        command: list[str], env: dict[str, str], seconds: float, said: str = ""
    ) -> subprocess.CompletedProcess[str]:
        if command == [CONTROL, "-d"]:
            told.append(env.get("CUDA_VISIBLE_DEVICES"))
            (Path(env[PIPE]) / "control").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(mps_module, "_run", run)
    monkeypatch.setattr(mps_module, "STOP_S", 0.0)
    monkeypatch.setenv(PIPE, str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with Mps.running() as mps:
        assert told == [None]
        assert "CUDA_VISIBLE_DEVICES" not in mps.environment()


@on_gpu
def test_our_daemon_serves_clients_and_goes() -> None:
    with Mps.running() as mps:
        assert mps.owned
        assert (mps.servers(), mps.clients(), mps.problem()) == ((), (), "")
        both = [client(mps), client(mps, share=40)]
        assert sorted(mps.clients()) == sorted(process.pid for process in both)
        assert (len(mps.servers()), mps.problem()) == (1, "")
        for process in both:
            process.kill()
            process.wait()
    assert not mps.pipe.exists()
    assert "does not answer" in mps.problem()


@on_gpu
def test_a_daemon_that_is_there_is_used_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with Mps.running() as users:
        monkeypatch.setenv(PIPE, str(users.pipe))
        with Mps.running() as ours:
            assert (ours.owned, ours.pipe) == (False, users.pipe)
        assert users.problem() == ""


@on_gpu
def test_a_daemon_that_died_is_a_problem_and_ends_quietly() -> None:
    with Mps.running() as mps:
        process = client(mps)
        os.kill(int((mps.pipe / f"{CONTROL}.pid").read_text()), signal.SIGKILL)
        process.kill()
        process.wait()
        time.sleep(0.5)
        assert "does not answer" in mps.problem()
