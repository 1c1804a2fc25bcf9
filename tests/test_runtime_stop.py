"""How a run's processes end: readers of shared pages before their owners, the ranks of a kind together."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

from runtime_tiny import tiny_plan

from rollplex.ir.job import Job
from rollplex.runtime.controller import Controller
from rollplex.runtime.crew import Gone, Mail
from rollplex.runtime.events import silent
from rollplex.runtime.protocol import ProcessId, Stop

KINDS, GPUS = ("train", "rollout"), 2


class Together:
    """A crew whose processes end when every rank of their kind was told to, as those in one group of NCCL do."""

    def __init__(self) -> None:
        self.told: list[ProcessId] = []
        self.members = {process: _member(process) for process in (ProcessId(k, r) for k in KINDS for r in range(GPUS))}
        self.inbox = self
        self._mail: queue.SimpleQueue[Mail] = queue.SimpleQueue()

    def post(self, process: ProcessId, message: Any) -> None:
        assert message == Stop()
        self.told.append(process)
        kind = [other for other in self.told if other.kind == process.kind]
        for other in kind if len(kind) == GPUS else ():
            self._mail.put((other, Gone(), []))

    def get(self, timeout: float) -> Mail:
        assert not self._mail.empty(), f"nobody ends: {self.told} were told to"
        return self._mail.get()


def _member(process: ProcessId) -> SimpleNamespace:
    patient, ended = SimpleNamespace(too_long=lambda: False), SimpleNamespace(wait=lambda seconds: 0)
    return SimpleNamespace(process=process, pid=1, silence=patient, child=ended)


def test_ranks_of_a_kind_end_together_and_readers_first() -> None:
    plan = tiny_plan(cluster={"gpus_per_node": GPUS}, workload={"prompts": 4})
    crew, none = Together(), None
    made: Any = Controller  # it looks at what a crew has and does, not at its class
    made(plan, Job.model_validate(plan.job), crew, none, silent, none).stop()
    assert [process.kind for process in crew.told] == ["rollout", "rollout", "train", "train"]
