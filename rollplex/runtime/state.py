"""All that changes while a program runs, in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollplex.backends.engine import Engine, Tasks, Values
from rollplex.backends.lanes import LaneSpan
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan
from rollplex.ir.planned_pool import LASTING
from rollplex.ir.steps import Step, named
from rollplex.runtime.link import Link
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.update import StreamedUpdate


@dataclass
class ProcessState:
    """One process in one iteration; `values` are those that this process produced or received in it.

    `lanes` is the work that ran beside its steps, `last_uses` what has no more use at the host behind a step, by its
    number. `imported` are the objects that it reads and another process owns.
    """

    process: ProcessId
    program: Sequence[Step]
    link: Link
    tasks: Tasks
    engine: Engine | None = None
    updates: Mapping[str, StreamedUpdate] = field(default_factory=dict)
    last_uses: Mapping[int, Sequence[str]] = field(default_factory=dict)
    imported: frozenset[str] = frozenset()
    iteration: int = -1
    window: str = ""
    values: Values = field(default_factory=dict)
    produced: set[str] = field(default_factory=set)
    lanes: list[LaneSpan] = field(default_factory=list)

    @property
    def memory(self) -> Engine:
        """The engine, for steps that only an engine process has."""
        assert self.engine is not None, f"{self.process} holds no objects"
        return self.engine

    def optimizer(self, role: str) -> StreamedUpdate:
        """The optimizer of a role, for steps that only a training rank has."""
        assert role in self.updates, f"{self.process} does not train {role}"
        return self.updates[role]


def engine_state(process: ProcessId, plan: Plan, job: Job, link: Link, engine: Engine) -> ProcessState:
    """The state of an engine process before its first iteration: what the plan says is there is produced."""
    there = {o.name for o in plan.summary.objects if o.start == "hbm" and process.kind in (o.process, *o.readers)}
    program, options = plan.programs[process.kind], job.optimizer
    updates = {
        role: StreamedUpdate(options, trained, program, job.run.silent_s, link.stage)
        for role, trained in engine.trained().items()
    }
    imported = frozenset(o.name for o in plan.summary.objects if process.kind in o.readers)
    last = last_uses(plan, process.kind)
    return ProcessState(process, program, link, engine, engine, updates, last, imported, produced=there)


def last_uses(plan: Plan, kind: str) -> dict[int, list[str]]:
    """What does not outlive an iteration and has a place in the pinned pool, by the step that names it last."""
    at = {name: index for index, step in enumerate(plan.programs[kind]) for name in named(step)}
    short = {o.name for o in plan.summary.objects if o.process == kind and o.class_ not in LASTING}
    found: dict[int, list[str]] = {}
    for place in plan.summary.host_pool.offsets:
        if place.object in short and place.object in at:
            found.setdefault(at[place.object], []).append(place.object)
    return found


def take(values: Mapping[str, object], names: Sequence[str]) -> Values:
    """The named values, for a task or a signal."""
    return {name: values[name] for name in names}
