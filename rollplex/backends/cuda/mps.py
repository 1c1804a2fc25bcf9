"""The MPS daemon of a run: both engines of a GPU share it in space, not in time slices, only as clients of one daemon.

    with Mps.running() as mps:                    the user's daemon where one answers, else one of our own
        start(engine, env | mps.environment(share=60))
        mps.problem()                             "" while its servers serve
                                                  ours is stopped here, the user's is left as it was

A process becomes a client when it first touches the GPU, by the variables it has then: they are set when it starts.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollplex.ir.errors import EngineError

CONTROL = "nvidia-cuda-mps-control"
PIPE, LOG, SHARE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
DEFAULT_PIPE = "/tmp/nvidia-mps"  # where a daemon listens that was not told another place
ANSWER_S, START_S, STOP_S = 5.0, 10.0, 10.0


@dataclass(frozen=True)
class Mps:
    """A daemon that listens in `pipe`; `owned` says whether it was started here. `log` is "" where it is unknown."""

    pipe: Path
    log: str
    owned: bool

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Mps]:
        """A daemon for the time of the block; EngineError where there is none and none can be started."""
        pipe = Path(os.environ.get(PIPE, DEFAULT_PIPE))
        if _answers(pipe):
            yield cls(pipe, os.environ.get(LOG, ""), owned=False)
            return
        with tempfile.TemporaryDirectory(prefix="rollplex-mps-", ignore_cleanup_errors=True) as home:
            mps = cls(Path(home), home, owned=True)
            mps._start()
            try:
                yield mps
            finally:
                mps._stop()

    def environment(self, share: int | None = None) -> dict[str, str]:
        """Variables of a client; `share` is the most that it may occupy, percent of the GPU's multiprocessors."""
        assert share is None or 1 <= share <= 100, f"a share of {share} percent"
        limit = {} if share is None else {SHARE: str(share)}
        return {PIPE: str(self.pipe), **({LOG: self.log} if self.log else {}), **limit}

    def ask(self, question: str) -> str:
        """The daemon's answer to a command of nvidia-cuda-mps-control; EngineError when there is none."""
        return _ask(self.pipe, question)

    def servers(self) -> tuple[int, ...]:
        """Pids of its servers: one for each user that has had clients."""
        return tuple(int(word) for word in self.ask("get_server_list").split() if word.isdigit())

    def clients(self) -> tuple[int, ...]:
        """Pids of all clients."""
        found = (self.ask(f"get_client_list {server}") for server in self.servers())
        return tuple(int(word) for text in found for word in text.split() if word.isdigit())

    def problem(self) -> str:
        """What is wrong with it, "" for nothing: a server that a client's fault has ended serves nobody any more."""
        try:
            states = {server: self.ask(f"get_server_status {server}") for server in self.servers()}
        except EngineError as err:
            return str(err)
        bad = (f"MPS server {server}: {state}" for server, state in states.items() if "FAULT" in state.upper())
        return "; ".join(bad)

    def _start(self) -> None:
        """For all GPUs: under CUDA_VISIBLE_DEVICES it would number them anew, and clients choose by the old numbers."""
        ours = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        done = _run([CONTROL, "-d"], {**ours, **self.environment()}, START_S)
        deadline = time.monotonic() + START_S
        while not _answers(self.pipe):
            if done.returncode or time.monotonic() > deadline:
                said = (done.stdout + done.stderr).strip() or "it does not answer"
                hint = f"look into {self.log}/control.log; on a shared machine, ask for a daemon of your own"
                raise EngineError(f"cannot start the MPS daemon: {said}", where=CONTROL, hint=hint)
            time.sleep(0.05)

    def _stop(self) -> None:
        """Clients should be gone; a daemon that still has some is told to end all the same."""
        try:
            self.ask("quit -t 5")
        except EngineError:
            return  # it has ended already
        deadline = time.monotonic() + STOP_S
        while _answers(self.pipe) and time.monotonic() < deadline:
            time.sleep(0.05)


def _answers(pipe: Path) -> bool:
    """Whether a daemon listens there."""
    if not (pipe / "control").exists():
        return False
    try:
        _ask(pipe, "get_default_active_thread_percentage")
        return True
    except EngineError:
        return False


def _ask(pipe: Path, question: str) -> str:
    done = _run([CONTROL], {**os.environ, PIPE: str(pipe)}, ANSWER_S, f"{question}\n")
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise EngineError(f"the MPS daemon in {pipe} does not answer `{question}`: {said}", where=CONTROL)
    return done.stdout.strip()


def _run(
    command: list[str], env: Mapping[str, str], seconds: float, said: str = ""
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, env=env, input=said, capture_output=True, text=True, timeout=seconds)
    except FileNotFoundError:
        hint = "it comes with the NVIDIA driver; without it two engines of a GPU only take turns"
        raise EngineError(f"{CONTROL} is not installed", hint=hint) from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"`{' '.join(command)}` has not ended for {seconds:g} s", where=CONTROL) from None
