"""The real engines, programs and executor in threads of one process, so that a test can look into their memory.

Only the transport is another one: values pass by reference, barriers are a condition variable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from rollplex.backends.engine import Values
from rollplex.backends.memory.ledger import Ledger
from rollplex.backends.rollout.engine import RolloutEngine
from rollplex.backends.training.trainer import TrainEngine
from rollplex.ir.engines import engine_module
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Step
from rollplex.runtime.barriers import Barriers, barrier_order
from rollplex.runtime.executor import run_iteration
from rollplex.runtime.memorylog import MemoryLog
from rollplex.runtime.preflight import make_feed
from rollplex.runtime.protocol import CONTROLLER, ProcessId
from rollplex.runtime.state import ProcessState, engine_state

TRAIN, ROLLOUT = ProcessId("train", 0), ProcessId("rollout", 0)
OnStep = Callable[[ProcessId, Step], None]


@dataclass
class Meeting:
    """What the threads share."""

    barriers: Barriers
    values: dict[str, Values] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    pages: dict[str, Sequence[int]] = field(default_factory=dict)
    failed: list[BaseException] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def until(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.failed or ready(), timeout=60), "a thread waits for ever"
            if self.failed:
                raise RuntimeError("another thread failed")


@dataclass
class ThreadLink:
    """`Link` of one thread."""

    process: ProcessId
    program: tuple[Step, ...]
    meeting: Meeting
    on_step: OnStep

    def enter(self, iteration: int, index: int) -> None:
        self.on_step(self.process, self.program[index])

    def stage(self, lane: str, text: str) -> None:
        pass

    def hold(self, waiting: bool) -> None:
        pass

    def leave(self, iteration: int, index: int, start_ns: int, stop_ns: int, held_ns: int) -> None:
        pass

    def signal(self, event: str, values: Values) -> None:
        with self.meeting.changed:
            self.meeting.values[event] = values
            self.meeting.changed.notify_all()

    def wait(self, event: str) -> Values:
        self.meeting.until(lambda: event in self.meeting.values)
        return self.meeting.values[event]

    def barrier(self, name: str) -> None:
        with self.meeting.changed:
            if self.meeting.barriers.arrive(self.process, name):
                self.meeting.passed.add(name)
                self.meeting.changed.notify_all()
        self.meeting.until(lambda: name in self.meeting.passed)

    def hand_out(self, name: str, fds: Sequence[int]) -> None:
        with self.meeting.changed:
            self.meeting.pages[name] = fds
            self.meeting.changed.notify_all()

    def pages(self, name: str, owner: int) -> Sequence[int]:
        self.meeting.until(lambda: name in self.meeting.pages)
        return self.meeting.pages.pop(name)


def assert_as_planned(plan: Plan, log: MemoryLog) -> None:
    """Every object in every window is what the plan says, to the byte, and in the pinned pool where; workspaces stay
    within it.
    """
    assert [row for row in log.objects(plan) if not row.as_planned] == []
    assert [w for w in log.windows(plan) if w.planned != w.measured] == []
    assert [p for p in log.pieces(plan) if p.planned != p.measured] == []
    assert [p for p in log.places(plan) if p.planned != p.measured] == []


class InThreads:
    """A run of a plan without processes: `run.step(k)`; `run.train` and `run.rollout` are there to look into."""

    def __init__(
        self, plan: Plan, hosts: Mapping[str, Callable[..., Any]], on_step: OnStep = lambda p, s: None
    ) -> None:
        self.plan = plan
        self.job = Job.model_validate(plan.job)
        self.feed = make_feed(plan, self.job, hosts)
        self.device = Ledger.create("device 0", plan.summary.capacity_bytes, process="controller")
        self.host = Ledger.create("host", plan.summary.host_capacity_bytes, process="controller")
        meeting = Path(mkdtemp(prefix="rollplex-test-"))
        modules = {kind: import_module(engine_module(plan.processes[kind].engine)) for kind in ("train", "rollout")}
        train, rollout = (m.build(plan, self.job, kind, 0, self._fds(), meeting) for kind, m in modules.items())
        assert isinstance(train, TrainEngine)
        assert isinstance(rollout, RolloutEngine)
        for name, fds in train.export().items():
            rollout.adopt(name, 0, fds, "start")
        self.train, self.rollout = train, rollout
        processes = (CONTROLLER, TRAIN, ROLLOUT)
        self.log = MemoryLog()
        self.meeting = Meeting(Barriers(processes, barrier_order(plan.programs["controller"])))
        self._together(train.ready, rollout.ready)
        self.links = {p: ThreadLink(p, plan.programs[p.kind], self.meeting, on_step) for p in processes}
        self.states = {
            CONTROLLER: ProcessState(CONTROLLER, plan.programs["controller"], self.links[CONTROLLER], self.feed),
            TRAIN: engine_state(TRAIN, plan, self.job, self.links[TRAIN], train),
            ROLLOUT: engine_state(ROLLOUT, plan, self.job, self.links[ROLLOUT], rollout),
        }

    def step(self, iteration: int) -> None:
        """One iteration of every program, its bytes compared with the plan; raises what a thread raised."""
        self.meeting.barriers.begin()
        self.meeting.values.clear()
        self.meeting.passed.clear()
        self._together(*(partial(run_iteration, state, iteration) for state in self.states.values()))
        self.log.add({process: state.memory.finish() for process, state in self.states.items() if state.engine})
        assert_as_planned(self.plan, self.log)

    def close(self) -> None:
        self.rollout.close()
        self.train.close()

    def _together(self, *works: Callable[[], Any]) -> None:
        """All at the same time, each in a thread of its own; raises what the first to fail raised."""
        threads = [threading.Thread(target=self._run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.meeting.failed:
            raise self.meeting.failed[0]

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as err:
            with self.meeting.changed:
                self.meeting.failed.append(err)
                self.meeting.changed.notify_all()

    def _fds(self) -> list[int]:
        return [self.device.export(), self.host.export()]
