"""The engine processes of a run: forked from a fresh interpreter, listened to, and gone when the `with` block ends.

    with Crew(processes, log_dir, threads) as crew:
        crew.post(train, Begin(0))
        process, message, fds = crew.inbox.get(timeout=..)

Two threads a process move messages, so that the controller never blocks on a process that does not read or write.
The processes die with the controller (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import rollplex
from rollplex.runtime import protocol
from rollplex.runtime.channel import Channel, Closed, pair
from rollplex.runtime.nursery import Child, Nursery, nursery
from rollplex.runtime.patience import Silence
from rollplex.runtime.process import PULSE_S
from rollplex.runtime.protocol import Message, ProcessId

START_S = 120.0  # importing torch and transformers from a cold disk


class Gone:
    """The channel of a process has ended: nothing more will come from it."""


Mail = tuple[ProcessId, "Message | Gone", list[int]]


@dataclass
class Member:
    """One engine process as the controller sees it."""

    process: ProcessId
    child: Child
    channel: Channel
    log: Path
    silence: Silence
    outbox: queue.SimpleQueue[tuple[Message, tuple[int, ...]]] = field(default_factory=queue.SimpleQueue)

    @property
    def pid(self) -> int:
        return self.child.pid


class Crew:
    """All engine processes; leaving the block kills and reaps every one of them, however it is left."""

    def __init__(
        self,
        processes: Iterable[ProcessId],
        log_dir: Path,
        threads: int,
        modules: Iterable[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.inbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self.members: dict[ProcessId, Member] = {}
        self._moving: list[threading.Thread] = []
        self._to_start = tuple(processes)
        self._log_dir = log_dir
        self._threads = threads
        self._modules = tuple(modules)
        self._variables = dict(variables or {})

    def __enter__(self) -> Crew:
        try:
            with nursery(child_environment(os.environ, self._threads) | self._variables) as start:
                for process in self._to_start:
                    self._start(start, process)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()

    def post(self, process: ProcessId, message: Message, fds: Iterable[int] = ()) -> None:
        """Send, without waiting; the descriptors are closed when they are sent."""
        self.members[process].outbox.put((message, tuple(fds)))

    def post_all(self, message: Message) -> None:
        """Send to every process."""
        for process in self.members:
            self.post(process, message)

    def kill(self) -> None:
        """End every process now and reap it; SIGKILL also ends a stopped one, so no wait here is long."""
        for member in self.members.values():
            member.child.kill()
        for member in self.members.values():
            member.child.wait()
            member.channel.close()
        for thread in self._moving:
            thread.join()
        self._close_undelivered()

    def _start(self, nursery: Nursery, process: ProcessId) -> None:
        ours, theirs = pair()
        log = self._log_dir / f"{process.kind}-{process.rank}.log"
        child = nursery.fork(str(process), theirs, log, self._modules)
        member = Member(process, child, Channel(ours), log, Silence(START_S))
        self.members[process] = member
        for target in (self._listen, self._talk):
            thread = threading.Thread(target=target, args=(member,), name=f"{target.__name__} {process}", daemon=True)
            thread.start()
            self._moving.append(thread)

    def _listen(self, member: Member) -> None:
        """Ends when the process is gone or the channel is closed."""
        while True:
            try:
                body, fds = member.channel.receive()
            except Closed:
                self.inbox.put((member.process, Gone(), []))
                return
            member.silence.heard()
            if body:
                self.inbox.put((member.process, protocol.decode(body), fds))

    def _talk(self, member: Member) -> None:
        """Sends what is posted, a pulse when there is nothing; ends as `_listen`."""
        while True:
            try:
                try:
                    message, fds = member.outbox.get(timeout=PULSE_S)
                except queue.Empty:
                    member.channel.pulse()
                else:
                    protocol.send(member.channel, message, fds)
            except Closed:
                return

    def _close_undelivered(self) -> None:
        while not self.inbox.empty():
            _close(self.inbox.get()[2])
        for member in self.members.values():
            while not member.outbox.empty():
                _close(member.outbox.get()[1])


def child_environment(ours: Mapping[str, str], threads: int) -> dict[str, str]:
    """The environment of an engine process: this package first, its share of CPU threads, no network."""
    package_root = str(Path(rollplex.__file__).parent.parent)
    path = os.pathsep.join(p for p in (package_root, ours.get("PYTHONPATH", "")) if p)
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    here = {"GLOO_SOCKET_IFNAME": ours.get("GLOO_SOCKET_IFNAME", "lo")}  # the name of a machine may lead nowhere
    return {**ours, **limits, **offline, **here, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
