"""Lanes of a GPU: each is a stream, the end of its work an event that other streams wait for, the host for none.

    load     |-- 1 --|-- 2 --|        loaded = lanes.run("load", "load of chunk 1", work)     returns when it is queued
    update           |-- 1 --|        lanes.run("update", .., after=[loaded])                  the stream waits, not we

What work raises while it is queued is raised at once; what goes wrong on the GPU shows at the next wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rollplex.backends.lanes import Event, LaneSpan, Tell, untold
from rollplex.ir.errors import EngineError

_TICK_S = 0.0005


@dataclass
class StreamEvent(Event):
    """The marks before and behind some work in its stream."""

    lane: str = ""
    began: torch.cuda.Event | None = None
    ended: torch.cuda.Event | None = None


class StreamLanes:
    """`Lanes` of one GPU; work on the device that takes longer than `patience_s` is given up by whoever waits.

    `tell` hears what is queued last.
    """

    def __init__(self, device: int, patience_s: float, tell: Tell = untold) -> None:
        self._device, self._patience_s, self._tell = device, patience_s, tell
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._done: list[StreamEvent] = []
        torch.cuda.synchronize(device)
        self._origin_ns, self._origin = time.monotonic_ns(), self._mark(torch.cuda.current_stream(device))

    def run(self, lane: str, text: str, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream(self._device)
            self._streams[lane].wait_event(self._origin)
        stream = self._streams[lane]
        self._tell(lane, text)
        for event in after:
            assert isinstance(event, StreamEvent), "events come from the lanes that wait for them"
            assert event.ended is not None, f"{event.text} has not been queued"
            stream.wait_event(event.ended)
        with torch.cuda.stream(stream):
            began = self._mark(stream)
            work()
            queued = StreamEvent(text, lane=lane, began=began, ended=self._mark(stream))
        self._done.append(queued)
        return queued

    def wait(self, events: Sequence[Event]) -> None:
        deadline = time.monotonic() + self._patience_s
        for event in events:
            assert isinstance(event, StreamEvent), "events come from the lanes that wait for them"
            assert event.ended is not None, f"{event.text} has not been queued"
            while not event.ended.query():
                if time.monotonic() > deadline:
                    what = f"{event.text} has not ended for {self._patience_s:g} s"
                    raise EngineError(what, where="GPU", hint="look at the log of this process")
                time.sleep(_TICK_S)

    def spans(self) -> tuple[LaneSpan, ...]:
        return tuple(
            LaneSpan(event.lane, event.text, self._clock(event.began), self._clock(event.ended))
            for event in self._done
            if event.began is not None and event.ended is not None
        )

    def close(self) -> None:
        """Whoever used the current stream goes on behind everything that lanes did."""
        current = torch.cuda.current_stream(self._device)
        for lane, stream in self._streams.items():
            current.wait_stream(stream)
            self._tell(lane, "")

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(stream)
        return mark

    def _clock(self, mark: torch.cuda.Event) -> int:
        return self._origin_ns + round(1e6 * self._origin.elapsed_time(mark))
