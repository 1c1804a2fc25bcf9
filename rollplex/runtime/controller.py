"""The controller's side of the protocol: one inbox, one handler a message, and an eye on every process.

    with Crew(..) as crew:
        controller = Controller(plan, crew, ..)
        controller.start(ledgers)            engines build, pages are shared
        controller.iteration(0)              everyone runs its program once, the controller too
        controller.ask("digests")            a question to every engine
        controller.stop()                    all exit with status 0

`pump` is the only place that blocks. It returns when what it waits for has happened, and raises as soon as a process
has died (its channel ends), has failed (it says so), or has said nothing for `silent_s`.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollplex.backends.engine import EngineReport, Tasks, Values
from rollplex.ir.errors import EngineError
from rollplex.ir.job import Job
from rollplex.ir.placement import peers
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Barrier, Step, Wait, describe, written_by_peers
from rollplex.runtime import death
from rollplex.runtime.barriers import Barriers, Events, barrier_order
from rollplex.runtime.carrying import keep, take_up
from rollplex.runtime.checkpoint import noted
from rollplex.runtime.crew import START_S, Crew, Gone, Member
from rollplex.runtime.events import Progress, Started, StepEntered
from rollplex.runtime.executor import run_iteration
from rollplex.runtime.gathering import gathered, seen_by
from rollplex.runtime.patience import TICK_S, Silence
from rollplex.runtime.protocol import (
    CONTROLLER,
    Adopt,
    Answer,
    Arrived,
    Ask,
    Assign,
    Begin,
    Deliver,
    Entered,
    Exported,
    Failed,
    Finished,
    Held,
    Left,
    Message,
    ProcessId,
    Ready,
    Release,
    Signalled,
    Stage,
    Stop,
)
from rollplex.runtime.spans import Timeline
from rollplex.runtime.stages import LIFE, Stages
from rollplex.runtime.state import ProcessState

EXIT_S = 20.0  # from the end of a healthy process' channel to its exit


def peers_of(plan: Plan, job: Job, process: ProcessId, name: str) -> tuple[ProcessId, ...]:
    """The ranks that write into a process' pages of an object, as it writes into theirs; none of a rollout rank."""
    if name not in written_by_peers(plan.programs[process.kind]):
        return ()
    return tuple(ProcessId(process.kind, rank) for rank in peers(job, process.rank))


class Controller:
    """Steps the barriers and events of a run by the messages of its processes; also the controller's own Link."""

    def __init__(self, plan: Plan, job: Job, crew: Crew, tasks: Tasks, progress: Progress, stages: Stages) -> None:
        programs = {process: plan.programs[process.kind] for process in (CONTROLLER, *crew.members)}
        self.plan = plan
        self.job = job
        self.crew = crew
        self.progress = progress
        self.stages = stages
        self.timeline = Timeline(programs)
        self.reports: dict[ProcessId, EngineReport] = {}
        self.facts: dict[ProcessId, dict[str, Any]] = {}
        self._barriers = Barriers(programs, barrier_order(programs[CONTROLLER]))
        self._events = Events(programs)
        self._own = ProcessState(CONTROLLER, programs[CONTROLLER], self, tasks)
        self._delivered: dict[str, Values] = {}
        self._answers: dict[ProcessId, dict[str, Any]] = {}
        self._stopping: set[ProcessId] = set()
        self._at_work: dict[ProcessId, Silence] = {}

    # ---- the life of a run

    def start(self, ledgers: Callable[[ProcessId], Sequence[int]], meeting: Path) -> None:
        """Assign every process its program; returns when all engines are ready.

        `ledgers` makes fresh descriptors for a process; ranks find each other in the directory `meeting`.
        """
        self.progress(Started({process: member.pid for process, member in self.crew.members.items()}))
        plan = self.plan.model_dump(mode="json", by_alias=True)
        for process in self.crew.members:
            self._works(process, START_S)
            self.crew.post(process, Assign(process, plan, str(meeting)), ledgers(process))
        self.pump(lambda: self.facts.keys() == self.crew.members.keys())
        for member in self.crew.members.values():
            member.silence.limit_s = self.job.run.silent_s

    def iteration(self, number: int) -> None:
        """One iteration: returns when every process has finished its program."""
        self.reports.clear()
        self._events.begin()
        self._barriers.begin()
        self.crew.post_all(Begin(number))
        run_iteration(self._own, number)
        self.timeline.rest(CONTROLLER, number)
        self.pump(lambda: self.reports.keys() == self.crew.members.keys())

    def ask(self, what: Ask, of: Callable[[ProcessId], bool] = lambda process: True) -> dict[ProcessId, dict[str, Any]]:
        """A question to the processes that `of` picks; their answers."""
        self._answers.clear()
        asked = {process for process in self.crew.members if of(process)}
        for process in asked:
            self._works(process)
            self.crew.post(process, what)
        self.pump(lambda: self._answers.keys() == asked)
        return dict(self._answers)

    def checkpoint(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Every process writes its part of a checkpoint; what each notes of it."""
        parts = {CONTROLLER: keep(self._own, self.job, folder), **self.ask(Ask("checkpoint", str(folder)))}
        return {str(process): parts[process] for process in sorted(parts)}

    def restore(self, folder: Path) -> None:
        """Every process becomes what it was at this checkpoint."""
        take_up(self._own, self.job, folder, noted(folder, str(CONTROLLER)))
        self.ask(Ask("restore", str(folder)))

    def stop(self) -> None:
        """Let every process end by itself, readers of shared pages before their owners; raises if one ends badly.

        The ranks of a kind end together: a group of NCCL waits for all of them.
        """
        readers = {kind for o in self.plan.summary.objects for kind in o.readers}
        for reads in (True, False):
            self._stopping = {process for process in self.crew.members if (process.kind in readers) == reads}
            for process in self._stopping:
                self.crew.post(process, Stop())
            self.pump(lambda: not self._stopping)

    # ---- the controller's own Link

    def enter(self, iteration: int, index: int) -> None:
        self._entered(CONTROLLER, iteration, index)

    def stage(self, lane: str, text: str) -> None:
        self.timeline.stage(CONTROLLER, lane, text)

    def hold(self, waiting: bool) -> None:
        raise AssertionError("the controller shares no GPU")

    def leave(self, iteration: int, index: int, start_ns: int, stop_ns: int, held_ns: int) -> None:
        self._at_work.pop(CONTROLLER, None)
        self.timeline.leave(CONTROLLER, iteration, index, start_ns, stop_ns, held_ns)

    def signal(self, event: str, values: Values) -> None:
        self._signalled(CONTROLLER, event, values)

    def wait(self, event: str) -> Values:
        self.pump(lambda: event in self._delivered)
        return self._delivered.pop(event)

    def barrier(self, name: str) -> None:
        passed = self._arrived(CONTROLLER, name)
        self.pump(lambda: passed or self._barriers.expected != name)

    def hand_out(self, name: str, fds: Sequence[int]) -> None:
        raise AssertionError("the controller has no pages")

    def pages(self, name: str, owner: int) -> Sequence[int]:
        raise AssertionError("the controller has no pages")

    # ---- messages

    def pump(self, until: Callable[[], bool]) -> None:
        """Handle messages until the condition holds; raises when a process has died, failed, or gone silent."""
        while not until():
            self._look_at_processes()
            try:
                process, message, fds = self.crew.inbox.get(timeout=TICK_S)
            except queue.Empty:
                self._look_for_deadlock()
                continue
            self._handle(self.crew.members[process], message, fds)

    def _handle(self, member: Member, message: Message | Gone, fds: list[int]) -> None:
        process = member.process
        if not isinstance(message, Signalled | Exported | Arrived | Stage):
            self._at_work.pop(process, None)
        match message:
            case Entered(iteration, index):
                self._entered(process, iteration, index)
            case Stage(lane, text):
                self.timeline.stage(process, lane, text)
                if lane == LIFE:
                    self.stages.begin(process, text)
            case Held(waiting):
                if not waiting:  # who waits is not at work
                    self._works(process)
            case Left(iteration, index, start_ns, stop_ns, held_ns):
                self.timeline.leave(process, iteration, index, start_ns, stop_ns, held_ns)
            case Signalled(event, values):
                self._signalled(process, event, values)
            case Arrived(barrier):
                self._arrived(process, barrier)
            case Exported(name):
                self._hand_out(process, name, fds)
            case Ready(facts):
                self.facts[process] = facts
            case Finished(iteration, report):
                self.timeline.rest(process, iteration)
                self.reports[process] = report
            case Answer(_, result):
                self._answers[process] = result
            case Failed():
                raise death.reason(member, self.crew.members.values(), self.timeline, message)
            case Gone() if process in self._stopping and death.status(member, EXIT_S) == 0:
                self._stopping.remove(process)
            case Gone():
                raise death.died(member, self.crew.members.values(), self.timeline)
            case _:
                raise EngineError(f"{process} sent {type(message).__name__}, which only the controller sends")

    def _entered(self, process: ProcessId, iteration: int, index: int) -> None:
        step = self.timeline.enter(process, iteration, index)
        if not isinstance(step, Wait | Barrier):  # who waits is not at work
            self._works(process)
        self.progress(StepEntered(process, iteration, step))

    def _signalled(self, process: ProcessId, event: str, values: Values) -> None:
        parts = self._events.signal(process, event, values)
        if not parts:
            return
        whole = gathered(self.job, parts)
        for receiver in self._events.receivers(event):
            if receiver == CONTROLLER:
                self._delivered[event] = whole
            else:
                self.crew.post(receiver, Deliver(event, seen_by(self.job, receiver, whole)))

    def _arrived(self, process: ProcessId, name: str) -> bool:
        passed = self._barriers.arrive(process, name)
        if passed:
            self.crew.post_all(Release(name))
        return passed

    def _hand_out(self, owner: ProcessId, name: str, fds: list[int]) -> None:
        """Pass an object's pages to those who read it on its GPU, and write into it from others.

        Each gets descriptors of its own.
        """
        readers = (ProcessId(kind, owner.rank) for kind in self.plan.object(name).readers)
        for process in (*readers, *peers_of(self.plan, self.job, owner, name)):
            self.crew.post(process, Adopt(name, owner.rank), [os.dup(fd) for fd in fds])
        for fd in fds:
            os.close(fd)

    def _works(self, process: ProcessId, at_least_s: float = 0.0) -> None:
        """From now until its next word the process is at work, and `step_timeout_s` counts."""
        if self.job.run.step_timeout_s:
            self._at_work[process] = Silence(max(self.job.run.step_timeout_s, at_least_s))

    def _look_at_processes(self) -> None:
        """A death shows by the end of the channel; here are those who are there but silent, or do not get on."""
        for member in self.crew.members.values():
            if member.silence.too_long():
                raise death.silent(member, self.crew.members.values(), self.timeline)
        for process, work in self._at_work.items():
            if work.too_long():
                raise death.stuck(process, work.limit_s, self.crew.members, self.timeline)

    def _look_for_deadlock(self) -> None:
        """Nobody runs, nobody is on the way: every process waits for what only another waiting process could give.

        A process that has not entered a step of this iteration is on the way; one that has reported is not.
        """
        current = self.timeline.current
        waiting = {process: step for process, (_, step) in current.items() if self._blocked(process, step)}
        on_the_way = self.crew.members.keys() - waiting.keys() - self.reports.keys()
        if CONTROLLER in waiting and not on_the_way:
            who = "; ".join(f"{process} in `{describe(step)}`" for process, step in sorted(waiting.items()))
            hint = "verify the plan with `rollplex verify`: a signal is missing, or barriers are crossed"
            raise EngineError(f"no process can go on: {who}", where="deadlock", hint=hint)

    def _blocked(self, process: ProcessId, step: Step) -> bool:
        """Whether only others can end the step; one that was stopped on its way to a barrier has not arrived there."""
        match step:
            case Wait(event=event):
                return event not in self._events.signalled
            case Barrier(name=name):
                return name == self._barriers.expected and process in self._barriers.arrived
            case _:
                return False
