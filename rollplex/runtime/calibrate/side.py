"""One side of a calibration: its processes, one a GPU, asked all at once; a question is done when each has answered.

    with ProcessSide.started("prefix", {0: command, 1: command}, env) as prefix:
        prefix.ask("sum", tokens=6144)       [{"seconds": 0.00021, ..}, {"seconds": 0.00020, ..}]

wait                  ended by                                  gives up
for all answers       the last of them, or the end of one       after ANSWER_S
for the others        once one has failed, or lost another      after OTHERS_S
for the end           the processes, which are told to end      after END_S, together; then they are killed

A rank that dies stops those that exchange with it: they are no further answer. Told is who failed by itself; where each
only waits for others, it is those who say nothing.
"""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from rollplex.ir.errors import EngineError, PeerError, Problem
from rollplex.runtime.calibrate.station import StationProcess

ANSWER_S, OTHERS_S, END_S = 180.0, 5.0, 20.0
Answer = dict[str, Any]


class Side(Protocol):
    """All processes that decode, or all that run prefixes."""

    def ask(self, what: str, **about: Any) -> list[Answer]:
        """The answers to a question, a process each; EngineError where one is missing."""
        ...


@dataclass(frozen=True)
class ProcessSide:
    """Its processes, in the order of their GPUs."""

    stations: tuple[StationProcess, ...]

    @classmethod
    @contextmanager
    def started(cls, name: str, commands: Mapping[int, Sequence[str]], env: Mapping[str, str]) -> Iterator[ProcessSide]:
        """For the time of the block, by GPU; they are not waited for until they are ready: `wait` does."""
        with ExitStack() as stack:
            of = {gpu: f" of GPU {gpu}" if len(commands) > 1 else "" for gpu in commands}
            entered = (StationProcess.started(f"{name} side{of[gpu]}", c, env) for gpu, c in commands.items())
            side = cls(tuple(stack.enter_context(station) for station in entered))
            try:
                yield side
            except BaseException:
                side._end(OTHERS_S)
                raise
            side._end(END_S)

    @property
    def facts(self) -> list[Answer]:
        """What each said when it was ready."""
        return [station.facts for station in self.stations]

    def wait(self) -> None:
        """Until all are ready."""
        for station, facts in zip(self.stations, self._answers("to be ready"), strict=True):
            station.facts = facts

    def ask(self, what: str, **about: Any) -> list[Answer]:
        for station in self.stations:  # before any answer is awaited: a collective needs them all
            station.send(what, about)
        return self._answers(" ".join([what, *(f"{k}={v}" for k, v in about.items())]))

    def _answers(self, asked: str) -> list[Answer]:
        found: dict[str, Answer] = {}
        failed: list[EngineError] = []
        silent, patience_s, since = list(self.stations), ANSWER_S, time.monotonic()
        while silent:
            left_s = since + patience_s - time.monotonic()
            if not (heard := select.select(silent, [], [], max(0.0, left_s))[0]):
                break
            for station in heard:
                silent.remove(station)
                try:
                    found[station.name] = station.answer(asked)
                except EngineError as err:
                    failed.append(err)
                    patience_s = min(patience_s, time.monotonic() - since + OTHERS_S)
        if failed or silent:
            raise _told(failed, [s.error(f"has not answered {asked} for {patience_s:.3g} s") for s in silent])
        return [found[station.name] for station in self.stations]

    def _end(self, seconds: float) -> None:
        """Tell all to end, and wait: ranks that exchange leave each other together."""
        deadline = time.monotonic() + seconds
        for station in self.stations:
            station.hang_up()
        for station in self.stations:
            with suppress(subprocess.TimeoutExpired):
                station.process.wait(max(0.0, deadline - time.monotonic()))


def _told(failed: Sequence[EngineError], silent: Sequence[EngineError]) -> EngineError:
    """Who failed by itself, else who says nothing, else who lost another; of the silent beside a failure, one line."""
    own = [err for err in failed if not isinstance(err, PeerError)]
    guilty = own or silent or failed
    meanwhile = [Problem(err.problems[0].what.splitlines()[0], "meanwhile") for err in silent] if own else []
    return EngineError(*(problem for err in guilty for problem in err.problems), *meanwhile)
