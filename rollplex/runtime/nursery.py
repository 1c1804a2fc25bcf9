"""Engine processes by fork: a nursery imports what engines need, once, and every engine process is a fork of it.

    controller                     nursery                 engine process
    fork(name, channel, log)   ->  import, fork, fork  ..   waits until the controller is its parent
    Child(pid)                 <-  .....................    says its pid, serves the channel

Importing torch and an engine takes each process seconds of CPU and hundreds of MiB; forks share both. The engine is the
controller's child all the same: the process between nursery and engine exits at once, and the controller adopts orphans
while it starts engines (PR_SET_CHILD_SUBREAPER). The nursery has one thread and no device; it ends when engines run.

    with kept():                   a program that makes many runs imports once for all of them
        run_plan(..); run_plan(..)
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from rollplex.ir.errors import EngineError
from rollplex.runtime.channel import Channel, Closed, pair
from rollplex.runtime.process import die_with, live

AT_IMPORT = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "HF_HUB_OFFLINE")
ADOPTED_S = 10.0  # from a fork to the engine's new parent: milliseconds
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_kept: list[Nursery] = []
_keeping: list[bool] = []


class Child:
    """A child process that was not started here; waits by pidfd, so that no other child is disturbed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self.wait(0)

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit status when it has ended; None if it runs after `seconds`."""
        if self._status is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(None if seconds is None else seconds * 1000):
                _, status = os.waitpid(self.pid, 0)
                self._status = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
        return self._status

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self._status is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class Nursery:
    """The controller's end of a nursery; of `environment`, what is read `AT_IMPORT` is that of all its engines."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        ours, theirs = pair()
        command = [sys.executable, "-P", "-m", "rollplex.runtime.nursery", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=self.environment,
            )
        self._channel = Channel(ours)

    @property
    def pid(self) -> int:
        """The nursery's own."""
        return self._process.pid

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether engines of this environment may be forked from it."""
        alike = all(self.environment.get(name) == environment.get(name) for name in AT_IMPORT)
        return alike and self._process.poll() is None

    def fork(self, name: str, channel: socket.socket, log: Path, modules: Iterable[str]) -> Child:
        """An engine process that serves `channel` (closed here) and writes to `log`; EngineError if there is none.

        `modules` are imported by the nursery before; one that cannot be is left for the engine to miss.
        """
        with channel, log.open("ab") as out:
            fds = [os.dup(channel.fileno()), os.dup(out.fileno())]
        try:
            with _adopting_orphans():
                asked = {"name": name, "modules": list(modules), "environment": self.environment}
                self._channel.send([json.dumps(asked).encode()], fds)
                body, _ = self._channel.receive()
        except Closed:
            what = f"cannot start {name}: the process that starts engines ended with status {self._process.wait()}"
            raise EngineError(what, hint="free memory, or look for what `import torch` prints") from None
        return Child(int(body))

    def close(self) -> None:
        """End it; its engines run on."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def nursery(environment: Mapping[str, str]) -> Iterator[Nursery]:
    """A nursery for one start; within `kept`, the one that is there, if it serves this environment."""
    one = _kept.pop() if _kept else None
    if one is None or not one.serves(environment):
        if one is not None:
            one.close()
        one = Nursery(environment)
    one.environment = dict(environment)
    try:
        yield one
    finally:
        if _keeping:
            _kept.append(one)
        else:
            one.close()


@contextmanager
def kept() -> Iterator[None]:
    """Within the block a nursery stays for the next run: one more process, idle."""
    _keeping.append(True)
    try:
        yield
    finally:
        _keeping.pop()
        while _kept and not _keeping:
            _kept.pop().close()


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Meanwhile, processes that lose their parent become children of this one."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# ---- the nursery's own side


def main() -> None:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    import rollplex.runtime.worker  # noqa: F401  (torch: seconds)

    while True:
        try:
            body, fds = channel.receive()
        except Closed:
            os._exit(0)
        asked = json.loads(body)
        for module in asked["modules"]:
            with suppress(ImportError):
                import_module(module)
        gc.freeze()  # a collection in an engine would write to every page that it shares
        if (between := os.fork()) == 0:
            _orphan(channel, asked, fds, parent)
        for fd in fds:
            os.close(fd)
        os.waitpid(between, 0)


def _orphan(nursery: Channel, asked: Mapping[str, Any], fds: Sequence[int], controller: int) -> None:
    """In the process between: fork the engine and be gone."""
    if os.fork() != 0:
        os._exit(0)
    try:
        serving, log = fds
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        _wait_for(controller)
        die_with(controller)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, asked["name"].encode(), 0, 0, 0)
        os.environ.clear()
        os.environ.update(asked["environment"])
        nursery.send([str(os.getpid()).encode()])
        nursery.close()
        live(socket.socket(fileno=serving))
    finally:
        os._exit(1)


def _wait_for(parent: int) -> None:
    deadline = time.monotonic() + ADOPTED_S
    while os.getppid() != parent and time.monotonic() < deadline:
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
