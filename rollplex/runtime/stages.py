"""What a run does before its first step and behind its last: a stage of each process at a time, and its seconds.

start    controller  starting processes 4.1      train 0  importing megatron 6.0, ..      rollout 0  starting vllm 14.2
end      controller  digests of all state 0.9, writing final/ 2.2, stopping engines 1.0
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from rollplex.runtime.events import Progress, StageBegun
from rollplex.runtime.protocol import ProcessId

LIFE = "life"
"""The lane of these stages among those of a process."""
Phase = Literal["start", "end"]


@dataclass(frozen=True)
class StageTime:
    """One stage of one process, on the controller's clock."""

    phase: Phase
    process: str
    stage: str
    seconds: float


class Stages:
    """Hears which stage a process begins; a new one, or an empty text, ends the one before."""

    def __init__(self, progress: Progress) -> None:
        self.phase: Phase = "start"
        self.found: list[StageTime] = []
        self._progress = progress
        self._at: dict[ProcessId, tuple[str, float]] = {}

    def begin(self, process: ProcessId, text: str) -> None:
        """The process is at this from now on."""
        now = time.monotonic()
        if process in self._at:
            stage, began = self._at.pop(process)
            self.found.append(StageTime(self.phase, str(process), stage, now - began))
        if text:
            self._at[process] = text, now
            self._progress(StageBegun(process, text))
