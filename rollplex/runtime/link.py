"""An engine process' end of the protocol: what it tells the controller, and the waits that only the controller ends.

wait                 ended by                                      gives up
event                Deliver, when another process signals it      after `silent_s` without a word from the controller
barrier              Release, when the last process arrives        likewise
pages                Adopt, when their owner has handed them out   likewise
command              Begin, Ask, Stop                              likewise
any of them          the death of the controller: the process exits at once
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from rollplex.backends.engine import Values
from rollplex.ir.errors import EngineError
from rollplex.runtime import protocol
from rollplex.runtime.channel import Channel, Closed
from rollplex.runtime.patience import TICK_S, Silence
from rollplex.runtime.protocol import (
    Adopt,
    Arrived,
    Deliver,
    Entered,
    Exported,
    Held,
    Left,
    Message,
    Release,
    Signalled,
    Stage,
)

ORPHANED = 70  # exit status of a process whose controller is gone


class Link(Protocol):
    """What the executor needs of the other processes; the controller has its own implementation."""

    def enter(self, iteration: int, index: int) -> None:
        """Step `index` begins."""
        ...

    def stage(self, lane: str, text: str) -> None:
        """A lane beside the steps begins some work, or is done where there is no text; from any thread."""
        ...

    def hold(self, waiting: bool) -> None:
        """The step that was entered waits for its turn, or need not any more."""
        ...

    def leave(self, iteration: int, index: int, start_ns: int, stop_ns: int, held_ns: int) -> None:
        """Step `index` is done, which began after `held_ns` in which it waited for its turn."""
        ...

    def signal(self, event: str, values: Values) -> None:
        """Announce an event."""
        ...

    def wait(self, event: str) -> Values:
        """Block until the event is signalled; its values."""
        ...

    def barrier(self, name: str) -> None:
        """Block until every process stands here."""
        ...

    def hand_out(self, name: str, fds: Sequence[int]) -> None:
        """Send an object's pages to the processes that map them; the descriptors are taken over."""
        ...

    def pages(self, name: str, owner: int) -> Sequence[int]:
        """Block until training rank `owner` has handed out its pages of an object; for the caller to close."""
        ...


class ChildLink:
    """The link of an engine process. The main thread waits; a reader thread fills what it waits for."""

    def __init__(self, channel: Channel, silent_s: float) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._silence = Silence(silent_s)
        self._commands: deque[tuple[Message, list[int]]] = deque()
        self._delivered: dict[str, Values] = {}
        self._pages: dict[tuple[str, int], list[int]] = {}
        self._released: set[str] = set()
        threading.Thread(target=self._listen, name="listen", daemon=True).start()

    def silent_after(self, silent_s: float) -> None:
        """The limit of every wait from now on."""
        self._silence.limit_s = silent_s

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send one message; the descriptors are closed when it is sent."""
        protocol.send(self._channel, message, tuple(fds))

    def command(self) -> tuple[Message, list[int]]:
        """Block until the controller asks for something."""
        self._until(lambda: bool(self._commands), "the controller's next command")
        return self._commands.popleft()

    def enter(self, iteration: int, index: int) -> None:
        self.send(Entered(iteration, index))

    def stage(self, lane: str, text: str) -> None:
        self.send(Stage(lane, text))

    def hold(self, waiting: bool) -> None:
        self.send(Held(waiting))

    def leave(self, iteration: int, index: int, start_ns: int, stop_ns: int, held_ns: int) -> None:
        self.send(Left(iteration, index, start_ns, stop_ns, held_ns))

    def signal(self, event: str, values: Values) -> None:
        self.send(Signalled(event, values))

    def wait(self, event: str) -> Values:
        self._until(lambda: event in self._delivered, f"event {event}")
        return self._delivered.pop(event)

    def barrier(self, name: str) -> None:
        self.send(Arrived(name))
        self._until(lambda: name in self._released, f"barrier {name}")
        self._released.remove(name)

    def hand_out(self, name: str, fds: Sequence[int]) -> None:
        self.send(Exported(name), fds)

    def pages(self, name: str, owner: int) -> Sequence[int]:
        self._until(lambda: (name, owner) in self._pages, f"the pages of {name} of rank {owner}")
        return self._pages.pop((name, owner))

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        with self._changed:
            while not ready():
                self._changed.wait(TICK_S)
                if self._silence.too_long():
                    limit = f"{self._silence.limit_s:g} s"
                    raise EngineError(f"no word from the controller for {limit} while waiting for {what}")

    def _listen(self) -> None:
        """Ends with the process: without a controller nobody is left to report to, and nothing to be saved."""
        while True:
            try:
                body, fds = self._channel.receive()
            except Closed:
                os._exit(ORPHANED)
            self._silence.heard()
            if body:
                self._take(protocol.decode(body), fds)

    def _take(self, message: Message, fds: list[int]) -> None:
        with self._changed:
            match message:
                case Deliver(event, values):
                    self._delivered[event] = values
                case Release(barrier):
                    self._released.add(barrier)
                case Adopt(name, owner):
                    self._pages[name, owner] = fds
                case _:
                    self._commands.append((message, fds))
            self._changed.notify_all()
