"""A process that measures what it is asked, a line of JSON each way (`rollplex.backends.cuda.bench`).

    station.send("gemm", "gemm tokens=4096", {"tokens": 4096})
    station.answer("gemm tokens=4096")                            {"tflops": 612.0}

Who waits for it, and how long, is side.py's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

from rollplex.backends.cuda.post import Post
from rollplex.ir.errors import EngineError, PeerError

SHOWN_LINES = 6
GONE_S = 20.0
"""For a process that has closed its pipe to end."""


def bench_command(post: Post) -> list[str]:
    """The process that measures on a GPU."""
    return [sys.executable, "-m", "rollplex.backends.cuda.bench", post.model_dump_json()]


@dataclass
class StationProcess:
    """A process; `facts` is the first line that it says by itself, when it is ready."""

    name: str
    process: subprocess.Popen[str]
    log: IO[str]
    facts: dict[str, Any] = field(default_factory=dict)
    _deaf: bool = False

    @classmethod
    @contextmanager
    def started(cls, name: str, command: Sequence[str], env: Mapping[str, str]) -> Iterator[StationProcess]:
        """It lives no longer than the block."""
        with tempfile.TemporaryFile("w+", prefix="rollplex-bench-") as log:
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=log, text=True, bufsize=1)
            try:
                yield cls(name, process, log)
            finally:
                process.kill()
                process.wait()
                for end in (process.stdin, process.stdout):
                    with suppress(BrokenPipeError):  # it did not hear the last question
                        assert end is not None
                        end.close()

    def fileno(self) -> int:
        """Readable when it has said something, or has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, what: str, about: Mapping[str, Any]) -> None:
        """Ask; one that has ended is found out by its `answer`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"ask": what, **about}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._deaf = True

    def answer(self, asked: str) -> dict[str, Any]:
        """The next line that it says; PeerError where it has lost another rank, else EngineError where there is none.

        Ends with the line, or with the process.
        """
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise self.error(self._ended(asked))
        try:
            found = json.loads(line)
        except ValueError:
            raise self.error(f"was asked for {asked} and said {line!r}") from None
        if "error" in found:
            raise self.error(f"{asked}: {found['error']}", PeerError if found.get("peer") else EngineError)
        return found

    def _ended(self, asked: str) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GONE_S)
        if self._deaf:
            return f"has ended before it was asked for {asked}"
        return f"has ended with status {self.process.returncode}, asked for {asked}"

    def error(self, what: str, kind: type[EngineError] = EngineError) -> EngineError:
        """With the last lines that the process wrote."""
        self.log.flush()
        self.log.seek(0)
        said = [line.rstrip() for line in self.log.readlines() if line.strip()][-SHOWN_LINES:]
        text = "\n".join([f"the {self.name} {what}", *(f"    {line}" for line in said)])
        return kind(text, where="calibrate", hint="free the GPU (nvidia-smi shows who has it), and try --quick")

    def hang_up(self) -> None:
        """No more questions: it ends."""
        with suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
