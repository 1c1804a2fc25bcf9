"""Work that overlaps, on named lanes, in order on each of them: threads on a host, streams and events on a GPU.

    load     |-- 1 --|-- 2 --|-- 3 --|                   loaded = lanes.run("load", "load of chunk 1", work)
    update           |-- 1 --|-- 2 --|-- 3 --|           updated = lanes.run("update", .., after=[loaded])
    store                    |-- 1 --|-- 2 --|-- 3 --|   lanes.run("store", .., after=[updated])

wait                          ended by                                  gives up
a lane, for `after`           the work of the other lane, or its error  after `patience_s`, or at `close`
the caller, in `wait`         the same                                  after `patience_s`
the caller, in `close`        the end of what lanes are doing           after `patience_s`; at once behind an error
An error of any work ends all work after it, and is raised at the caller's next call: it names the work.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollplex.ir.errors import EngineError, PeerError, Problem, RollplexError

_TICK_S = 0.2
_HINT = "look at the log of this process; the weights that were published last are whole, those in memory are not"


Tell = Callable[[str, str], None]
"""Hears of a lane what it begins; nothing, "", when that is done."""


def untold(lane: str, text: str) -> None:
    """`Tell` where nobody listens."""


@dataclass(frozen=True)
class LaneSpan:
    """Work of a lane, for the trace; CLOCK_MONOTONIC nanoseconds."""

    lane: str
    text: str
    start_ns: int
    stop_ns: int


@dataclass
class Event:
    """The end of some work that comes behind `after`; `failed` is why there is no result."""

    text: str
    after: Sequence[Event] = ()
    over: threading.Event = field(default_factory=threading.Event)
    failed: EngineError | None = None

    def late(self) -> Event:
        """What it comes down to when this is not over: the first work that waits for nothing else."""
        return next((a.late() for a in self.after if not a.over.is_set()), self)


class Lanes(Protocol):
    """What overlapping work needs of a device. On a GPU a lane is a stream, an event is recorded behind the work."""

    def run(self, lane: str, text: str, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        """Do work on a lane, behind what the lane has and behind `after`; raises what earlier work raised."""
        ...

    def wait(self, events: Sequence[Event]) -> None:
        """Block until all are over; EngineError of the first that failed."""
        ...

    def spans(self) -> tuple[LaneSpan, ...]:
        """What ran when."""
        ...

    def close(self) -> None:
        """No more work; returns when no lane is at work any more, but for one that hangs."""
        ...


class ThreadLanes:
    """`Lanes` of a host: `own` runs in the thread that calls, every other lane in a thread of its own.

    Threads are daemons: one that hangs does not keep the process from ending. `tell(lane, text)` hears what a lane
    begins, in the lane's thread, and an empty text when it is done. Errors name `where` it happened.
    """

    def __init__(self, own: str, patience_s: float, tell: Tell = untold, where: str = "optimizer") -> None:
        self._own, self._patience_s, self._tell, self._where = own, patience_s, tell, where
        self._queues: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._last: dict[str, Event] = {}
        self._spans: list[LaneSpan] = []
        self._threads: list[threading.Thread] = []
        self._failed: EngineError | None = None
        self._closed = False

    def run(self, lane: str, text: str, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        self._refuse_failed()
        before = [self._last[lane]] if lane in self._last else []
        event = self._last[lane] = Event(text, [*before, *after])
        if lane == self._own:
            self._do(lane, event, work)
            self._refuse_failed()
        else:
            self._queue(lane).put(lambda: self._do(lane, event, work))
        return event

    def wait(self, events: Sequence[Event]) -> None:
        for event in events:
            self._until(event)
            if event.failed:
                raise event.failed

    def spans(self) -> tuple[LaneSpan, ...]:
        return tuple(self._spans)

    def close(self) -> None:
        self._closed = True
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join(_TICK_S if self._failed else self._patience_s)

    def _queue(self, lane: str) -> queue.SimpleQueue[Callable[[], None] | None]:
        if lane not in self._queues:
            made = self._queues[lane] = queue.SimpleQueue()
            self._threads.append(threading.Thread(target=_serve, args=(made,), name=f"lane {lane}", daemon=True))
            self._threads[-1].start()
        return self._queues[lane]

    def _do(self, lane: str, event: Event, work: Callable[[], None]) -> None:
        """The work, or the error of what it waits for; the event is over in any case, and knows no others any more."""
        try:
            self.wait(event.after)
            self._tell(lane, event.text)
            start_ns = time.monotonic_ns()
            event.failed = _done(event.text, work, self._where)
            self._spans.append(LaneSpan(lane, event.text, start_ns, time.monotonic_ns()))
            self._tell(lane, "")
        except EngineError as err:
            event.failed = err
        self._failed = self._failed or event.failed
        event.after = ()
        event.over.set()

    def _until(self, event: Event) -> None:
        """Looks are counted, not the clock: a laptop that sleeps is nobody's fault."""
        for _ in range(max(1, round(self._patience_s / _TICK_S))):
            if event.over.wait(_TICK_S):
                return
            if self._closed:
                break
        what = f"{event.late().text} has not ended for {self._patience_s:g} s"
        self._failed = self._failed or EngineError(what, where=self._where, hint=_HINT)
        raise self._failed

    def _refuse_failed(self) -> None:
        if self._failed:
            raise self._failed


def _serve(waiting: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """A lane's thread: one piece of work after another, until `close`."""
    while (work := waiting.get()) is not None:
        work()


def _done(text: str, work: Callable[[], None], where: str) -> EngineError | None:
    """Do it; an error of it with the work's name. A bug of ours leaves its traceback in the process' log.

    A peer that is gone stays one: the controller then looks for the process that went first.
    """
    try:
        work()
        return None
    except RollplexError as err:
        placed = ((f"{p.where}: {p.what}" if p.where else p.what, p.hint or _HINT) for p in err.problems)
        kind = PeerError if isinstance(err, PeerError) else EngineError
        return kind(*(Problem(f"{text}: {what}", where, hint) for what, hint in placed))
    except Exception as err:
        traceback.print_exception(err)
        return EngineError(f"{text}: {type(err).__name__}: {err}", where=where, hint=_HINT)
