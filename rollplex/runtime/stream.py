"""The chunks of one update on their way through a ring of workspaces: load, update and store side by side.

    chunk     0       1       2       3        workspace of chunk i: i % in_flight
    load      ws 0    ws 1    ws 2    ws 0     after the store of chunk i - in_flight, which had the workspace
    update            ws 0    ws 1    ws 2     after the load of chunk i
    store                     ws 0    ws 1     after the update of chunk i
Who calls `update(i)` may go on while chunk i is stored and the next chunks are loaded; `update` of the last chunk
returns when everything is stored. Paper section 3.3; the lanes are those of `backends.lanes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rollplex.backends.lanes import Event, Lanes, LaneSpan
from rollplex.runtime.optimizer import ChunkedAdam, FlatState, Workspace, allocate_workspace

UPDATE = "update"
"""The lane of the caller; the others are `load` and `store`."""
Range = tuple[int, int]


def ring(
    chunks: Sequence[Range], in_flight: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> list[Workspace]:
    """Workspaces for at most `in_flight` chunks at a time, each as long as the longest chunk that it gets."""
    sizes = [max(stop - start for start, stop in chunks[i::in_flight]) for i in range(min(in_flight, len(chunks)))]
    return [allocate_workspace(size, dtype, device) for size in sizes]


def in_place(state: FlatState, chunks: Sequence[Range]) -> list[Workspace]:
    """The state itself, chunk by chunk: nothing is loaded."""
    parts = (state.master, state.exp_avg, state.exp_avg_sq, state.grad)
    return [Workspace(*(part[start:stop] for part in parts)) for start, stop in chunks]


@dataclass
class ChunkStream:
    """One update, number `step` (from 1), with gradients scaled by `scale`; `owner` is for messages and the trace."""

    adam: ChunkedAdam
    chunks: Sequence[Range]
    workspaces: Sequence[Workspace]
    lanes: Lanes
    step: int
    scale: float
    owner: str
    _loaded: list[Event] = field(default_factory=list)
    _works: list[Workspace] = field(default_factory=list)
    _stored: list[Event] = field(default_factory=list)

    def update(self, index: int) -> None:
        """Update the next chunk; EngineError that names stage and chunk when one of any chunk has failed."""
        assert index == len(self._stored), f"chunk {index} comes after {len(self._stored)} chunks"
        try:
            while len(self._loaded) < min(index + len(self.workspaces), len(self.chunks)):
                self._loaded.append(self._load(len(self._loaded)))
            self._stored.append(self._store(index, self._update(index)))
            if len(self._stored) == len(self.chunks):
                self.lanes.wait(self._stored)
                self.close()
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> bool:
        """Whether every chunk is stored."""
        return len(self._stored) == len(self.chunks)

    def close(self) -> None:
        """Give the update up: nothing of it is at work when this returns."""
        self.lanes.close()

    def spans(self) -> tuple[LaneSpan, ...]:
        """When each stage of each chunk ran."""
        return self.lanes.spans()

    def _load(self, index: int) -> Event:
        (start, stop), room = self.chunks[index], len(self.workspaces)
        workspace = Workspace(*(part[: stop - start] for part in vars(self.workspaces[index % room]).values()))
        self._works.append(workspace)

        def work() -> None:
            self.adam.load(start, stop, self.scale, workspace)

        free = [self._stored[index - room]] if index >= room else []
        return self.lanes.run("load", self._text("load", index), work, after=free)

    def _update(self, index: int) -> Event:
        def work() -> None:
            self.adam.update(self._works[index], *self.chunks[index], self.step)

        return self.lanes.run(UPDATE, self._text(UPDATE, index), work, after=[self._loaded[index]])

    def _store(self, index: int, updated: Event) -> Event:
        def work() -> None:
            self.adam.store(self._works[index], *self.chunks[index])

        return self.lanes.run("store", self._text("store", index), work, after=[updated])

    def _text(self, stage: str, index: int) -> str:
        return f"{stage} of chunk {index} of {self.owner}"
