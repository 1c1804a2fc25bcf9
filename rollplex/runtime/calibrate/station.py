"""A process that measures what it is asked, a line of JSON each way (`rollplex.backends.cuda.bench`).

    with StationProcess.started("decode", command, env) as station:
        station.ask("gemm", tokens=4096)       {"tflops": 612.0}

wait                  ended by                             gives up
for an answer         the answer, or the process' end      after ANSWER_S
for the end           the process, which is told to end    after END_S; then it is killed
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, Protocol

from rollplex.ir.errors import EngineError

ANSWER_S, END_S = 180.0, 20.0
SHOWN_LINES = 6


class Station(Protocol):
    """One side of a calibration."""

    def ask(self, what: str, **about: Any) -> dict[str, Any]:
        """The answer to a question; EngineError where there is none."""
        ...


def bench_command(told: Mapping[str, Any]) -> list[str]:
    """The process that measures on a GPU, told about its shape."""
    return [sys.executable, "-m", "rollplex.backends.cuda.bench", json.dumps(told)]


@dataclass
class StationProcess:
    """A process; `facts` is the first line that it says by itself, when it is ready."""

    name: str
    process: subprocess.Popen[str]
    log: IO[str]
    facts: dict[str, Any]

    @classmethod
    @contextmanager
    def started(cls, name: str, command: Sequence[str], env: Mapping[str, str]) -> Iterator[StationProcess]:
        """For the time of the block; it is not waited for until it is ready: `wait` does."""
        with tempfile.TemporaryFile("w+", prefix="rollplex-bench-") as log:
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=log, text=True, bufsize=1)
            station = cls(name, process, log, {})
            try:
                yield station
            finally:
                station._end()

    def wait(self) -> None:
        """Until it is ready."""
        self.facts = self._answer("to be ready")

    def ask(self, what: str, **about: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        asked = " ".join([what, *(f"{k}={v}" for k, v in about.items())])
        try:
            self.process.stdin.write(json.dumps({"ask": what, **about}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._error(f"has ended before it was asked for {asked}") from None
        return self._answer(asked)

    def _answer(self, asked: str) -> dict[str, Any]:
        line = self._line(asked)
        try:
            found = json.loads(line)
        except ValueError:
            raise self._error(f"was asked for {asked} and said {line!r}") from None
        if "error" in found:
            raise self._error(f"{asked}: {found['error']}")
        return found

    def _line(self, asked: str) -> str:
        out, deadline = self.process.stdout, time.monotonic() + ANSWER_S
        assert out is not None
        if not select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise self._error(f"has not answered {asked} for {ANSWER_S:g} s")
        if not (line := out.readline()):
            self.process.wait(END_S)
            raise self._error(f"has ended with status {self.process.returncode}, asked for {asked}")
        return line

    def _error(self, what: str) -> EngineError:
        """With the last lines that the process wrote."""
        self.log.flush()
        self.log.seek(0)
        said = [line.rstrip() for line in self.log.readlines() if line.strip()][-SHOWN_LINES:]
        text = "\n".join([f"the {self.name} side {what}", *(f"    {line}" for line in said)])
        return EngineError(text, where="calibrate", hint="free the GPU (nvidia-smi shows who has it), and try --quick")

    def _end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):  # it is gone, and did not hear the last question
                assert pipe is not None
                pipe.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
