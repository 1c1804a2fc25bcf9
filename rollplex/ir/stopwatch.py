"""Where the seconds of a command go: stages by name, and the part of each that solvers took.

with Stopwatch() as watch:
    with stage("layout"): ..          minimise(..) inside adds its seconds with `solving`
watch.stages                          (Stage("layout", 0.031, 0.012),)

Outside a Stopwatch nothing is recorded; a stage inside a stage counts as the outer one's time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One part of a command: its wall seconds, and how many of them a solver ran."""

    name: str
    seconds: float
    solver_s: float = 0.0


class Stopwatch:
    """Records the stages that begin and end while it is entered, in this thread only."""

    def __init__(self) -> None:
        self._stages: list[Stage] = []
        self._inside = False
        self._solver_s = 0.0
        self._token: Token[Stopwatch | None] | None = None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What was recorded, in order."""
        return tuple(self._stages)

    def __enter__(self) -> Stopwatch:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current.reset(self._token)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._inside, self._solver_s = True, 0.0
        began = time.perf_counter()
        try:
            yield
        finally:
            self._stages.append(Stage(name, time.perf_counter() - began, self._solver_s))
            self._inside = False


_current: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """A part of the command, recorded under this name if somebody is measuring and it is not inside another."""
    watch = _current.get()
    if watch is None or watch._inside:
        yield
        return
    with watch._stage(name):
        yield


def solving(seconds: float) -> None:
    """Seconds of the current stage that a solver ran."""
    if (watch := _current.get()) is not None:
        watch._solver_s += seconds
