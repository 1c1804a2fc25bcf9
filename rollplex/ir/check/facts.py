"""A plan looked up by name: objects, windows, the places of barriers, and what each step touches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rollplex.ir.check.rules import At
from rollplex.ir.check.said import said
from rollplex.ir.job import Job
from rollplex.ir.parts import of_round
from rollplex.ir.plan import BARRIERS, Plan, PlannedObject, is_observation, references
from rollplex.ir.planned_job import accepted
from rollplex.ir.steps import (
    Barrier,
    Drop,
    Exchange,
    Export,
    Fetch,
    Map,
    MapPart,
    Offload,
    Publish,
    Rebuild,
    Run,
    Step,
    Unmap,
    UnmapPart,
    UpdateChunk,
    written_by_peers,
)

ROLLOUT_COMPLETE, THETA_QUIET, PUBLISHED = BARRIERS
TOWER = ".vision"
"""How the names of vision towers end."""
TIMELINE = "train"
"""The program whose steps say which window it is."""
BY_GROUP = ("prefix", "suffix", "whole", "train", "prefix_backward")
"""Tasks whose microbatch is a prompt group, and so a slot of slotted objects."""


ON_PROMPTS = ("rx.generate", "rx.prefix", "rx.suffix", "rx.logprobs", "rx.values", "rx.score")
"""Calls whose first value is prompts, or a boundary of prompts."""


@dataclass(frozen=True)
class Facts:
    """What the checks ask of a plan whose names are known."""

    plan: Plan

    @cached_property
    def job(self) -> Job | None:
        """The plan's job; none where it is refused, which `asked` tells."""
        return accepted(self.plan)

    @cached_property
    def objects(self) -> dict[str, PlannedObject]:
        """Objects by name."""
        return {o.name: o for o in self.plan.summary.objects}

    @cached_property
    def windows(self) -> tuple[str, ...]:
        """Windows in order."""
        return tuple(w.name for w in self.plan.summary.windows)

    @property
    def programs(self) -> dict[str, tuple[Step, ...]]:
        """Steps by process kind."""
        return self.plan.programs

    @cached_property
    def _places(self) -> dict[str, tuple[At, ...]]:
        return {p: tuple(At(p, i, s) for i, s in enumerate(steps)) for p, steps in self.programs.items()}

    def steps(self, *processes: str) -> Iterator[At]:
        """Every step of these programs (of all, if none is named)."""
        for process in processes or self.programs:
            yield from self._places[process]

    def runs(self, *tasks: str) -> Iterator[tuple[At, Run]]:
        """Every run of these tasks."""
        for at in self.steps():
            if isinstance(at.step, Run) and at.step.task in tasks:
                yield at, at.step

    @cached_property
    def importers(self) -> dict[str, tuple[str, ...]]:
        """Who maps pages that other processes own: an object's readers, and its owner's ranks each other's."""
        peers = {p: {*written_by_peers(steps), *map(imports, steps)} for p, steps in self.programs.items()}
        return {
            o.name: (*o.readers, *((o.process,) if o.name in peers[o.process] else ())) for o in self.objects.values()
        }

    @cached_property
    def pools(self) -> dict[str, tuple[str, ...]]:
        """The processes that share the GPUs of each pool; those without a GPU are in none."""
        found: dict[str, tuple[str, ...]] = {}
        for name, kind in self.plan.processes.items():
            if kind.pool:
                found[kind.pool] = (*found.get(kind.pool, ()), name)
        return found

    @cached_property
    def barriers(self) -> dict[tuple[str, str], int]:
        """The place of every barrier in every program."""
        return {(at.process, at.step.name): at.index for at in self.steps() if isinstance(at.step, Barrier)}

    def past(self, at: At, barrier: str) -> bool:
        """Whether a step stands behind a barrier of its program."""
        return at.index > self.barriers.get((at.process, barrier), len(self.programs[at.process]))

    @cached_property
    def groups(self) -> list[tuple[At, Run]]:
        """Every run that works on one prompt group."""
        return list(self.runs(*BY_GROUP))

    @property
    def streamed(self) -> bool:
        """Whether groups are trained on while others decode."""
        return self.plan.schedule == "streamed"

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Roles that the plan updates."""
        return tuple(dict.fromkeys(at.step.role for at in self.steps() if isinstance(at.step, UpdateChunk)))

    @cached_property
    def adapted(self) -> dict[str, str]:
        """Roles that are trained through adapters, and how the rollout engine is served them: `adapter`, `merged`."""
        sections = said(self.plan, "lora")
        adapters = {name: lora for name, lora in sections.items() if isinstance(lora, dict) and name in self.trained}
        return {name: str(lora.get("served")) for name, lora in adapters.items()}

    def frozen_part(self, o: PlannedObject) -> bool:
        """Whether the job freezes this part of a trained role: its vision tower, all but adapters and merged copies."""
        if o.role in self.adapted and o.class_ == "regenerable":
            copy = "rollout.weights" if self.adapted[o.role] == "merged" else "rollout.adapters"
            return o.name not in (f"{o.role}.snapshot", copy)
        match self.plan.job:
            case {"roles": {o.role: {"freeze": list() | tuple() as parts}}}:
                return o.name.endswith(TOWER) and "vision" in parts
            case _:
                return False

    @cached_property
    def bases(self) -> frozenset[str]:
        """Language weights beside adapters, on the trainer: a frozen role of the same weights reads them too."""
        own = (o for o in self.objects.values() if o.process == TIMELINE and o.role in self.adapted)
        return frozenset(o.name for o in own if self.frozen_part(o) and not o.name.endswith(TOWER))

    def needed_bases(self, role: str) -> frozenset[str]:
        """Those that a role's language model cannot do without: of its own, or, where it has no weights, of another."""
        own = (o for o in self.objects.values() if o.role == role and o.class_ == "regenerable")
        borrows = role not in self.trained and all(o.name.endswith(TOWER) for o in own)
        return self.bases if borrows or role in self.adapted else frozenset()

    @cached_property
    def theta(self) -> dict[str, str]:
        """Objects that hold weights which the update changes, and their role; copies of them included."""
        return {
            o.name: o.role
            for o in self.objects.values()
            if o.class_ == "regenerable" and o.role in self.trained and not o.host_backed and not self.frozen_part(o)
        }

    @cached_property
    def copies(self) -> frozenset[str]:
        """Objects with weights of a trained role that no chunk writes: they are made from others."""
        written = {n for at in self.steps() if isinstance(at.step, UpdateChunk) for n in at.step.writes}
        return frozenset(self.theta) - written

    @cached_property
    def _gradients(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, dict[str, None]] = {role: {} for role in self.trained}
        chunks = [at.step for at in self.steps() if isinstance(at.step, UpdateChunk)]
        taken: dict[str, set[str]] = {}
        for step in (*chunks, *(s for _, s in self.runs("grad_norm"))):
            taken.setdefault(step.role, set()).update(step.reads, step.streams)
        for _, step in self.runs("train"):
            own = taken.get(step.role, ())
            found.setdefault(step.role, {}).update(dict.fromkeys(n for n in step.writes if n in own))
        return {role: tuple(names) for role, names in found.items()}

    def gradients(self, role: str) -> tuple[str, ...]:
        """What the role's backward writes, and its norm or update takes."""
        return self._gradients.get(role, ())

    def permanent(self, role: str) -> tuple[str, ...]:
        """Master weights and optimizer state of a role."""
        return tuple(o.name for o in self.objects.values() if o.class_ == "permanent" and o.role == role)

    @cached_property
    def turn(self) -> dict[str, int]:
        """The turn of every call of the graph, and of its prompts: one more for each observation behind them."""
        found: dict[str, int] = {}
        for r in self.plan.graph:
            here = found.get(next(references(r.args), ""), 1)
            found[r.name] = here + 1 if is_observation(r) else here if r.op in ON_PROMPTS else 1
        return found

    @cached_property
    def observations(self) -> frozenset[str]:
        """Histories that a next turn is sampled from."""
        sampled = {n for r in self.plan.graph if r.op == "rx.generate" for n in references(r.args)}
        return frozenset(r.name for r in self.plan.graph if is_observation(r) and r.name in sampled)

    @cached_property
    def turns(self) -> int:
        """Turns of a trajectory: responses that are sampled one behind the other."""
        return max((self.turn[r.name] for r in self.plan.graph if r.op == "rx.generate"), default=1)

    @cached_property
    def pieces(self) -> dict[str, tuple[PlannedObject, ...]]:
        """What each role's suffixes need of its prefixes, in the order in which they are made: a piece a turn."""
        first: dict[str, int] = {}
        for at, step in self.runs("prefix"):
            first |= {name: at.index for name in step.writes if name not in first}
        boundaries = (o for o in self.objects.values() if o.class_ == "boundary")
        found = sorted(boundaries, key=lambda o: first.get(o.name, len(self.programs[o.process])))
        return {role: tuple(o for o in found if o.role == role) for role in dict.fromkeys(o.role for o in found)}

    @cached_property
    def boundaries(self) -> dict[str, PlannedObject]:
        """What each role's first prefix leaves to its suffixes."""
        return {role: found[0] for role, found in self.pieces.items()}

    @cached_property
    def judged(self) -> tuple[str, ...]:
        """What says which groups of a round are kept: the prompts, and all behind the plan's mask that a task makes."""
        if self.plan.summary.rounds is None:
            return ()
        args = {r.name: set(references([r.args, r.kwargs])) for r in self.plan.graph}
        behind, todo = set[str](), [self.plan.summary.rounds.keeps]
        while todo:
            name = todo.pop()
            if name not in behind:
                behind.add(name)
                todo.extend(args.get(name, ()))
        makers = (r for r in self.plan.graph if r.op in ("input", "rx.generate", "rx.host"))
        return tuple(r.name for r in makers if r.name in behind or r.op == "input")

    @property
    def last_round(self) -> int:
        """The number of the last round of sampling."""
        return self.plan.summary.rounds.most - 1 if self.plan.summary.rounds else 0

    def by_round(self, step: Run) -> bool:
        """Whether a task is one of a round: it samples for prompts, or judges responses, of that round alone."""
        return step.task in ("load", "generate", "host") and step.node in self.judged

    def in_round(self, name: str, number: int) -> str:
        """A value as a round makes it: the last round's are those of the step."""
        return of_round(name, number) if name in self.judged and number < self.last_round else name

    @cached_property
    def with_group(self) -> frozenset[str]:
        """Trained roles whose prefix the job runs with its group: their boundary has room for one at a time."""
        asked = said(self.plan, "prefix_saved")
        return frozenset(name for name in self.trained if asked.get(name) == "group")

    def group_count(self, role: str) -> int:
        """Prompt groups of a rank: the slots of the role's boundary, or those of its share of the step's prompts."""
        if role in self.boundaries and role not in self.with_group:
            return self.boundaries[role].slots
        match self.plan.job:
            case {"workload": {"prompts": int(prompts)}}:
                return prompts // max(1, self.plan.processes[TIMELINE].copies(role))
            case _:
                return 0

    @cached_property
    def makers(self) -> dict[str, str]:
        """The role whose task makes each value that is there group by group."""
        return {name: s.role for _, s in self.runs("suffix", "whole", "train") for name in s.outputs}

    @cached_property
    def saved(self) -> dict[str, tuple[PlannedObject, ...]]:
        """What each role's prefixes save for their backward, a piece a turn."""
        kept = [o for o in self.objects.values() if o.class_ == "phase-local" and o.attached]
        rank = {name: i for i, name in enumerate(self.windows)}
        kept.sort(key=lambda o: rank.get(o.produced, -1))
        return {role: tuple(o for o in kept if o.role == role) for role in dict.fromkeys(o.role for o in kept)}

    def saved_by(self, step: Run) -> PlannedObject | None:
        """What a prefix saves, or its backward needs."""
        found, turn = self.saved.get(step.role, ()), self.turn.get(step.node, 1)
        return found[turn - 1] if turn <= len(found) else None

    def taken(self, role: str) -> int:
        """Prompt groups of a rank that a step trains or scores on: all, or those that are complete, numbered first."""
        tail, groups = self.plan.summary.tail, self.group_count(role)
        return groups if tail is None else min(groups, tail.taken // max(1, self.plan.processes[TIMELINE].copies(role)))

    def parts(self, step: Step, o: PlannedObject) -> frozenset[int]:
        """Slots of an object that a step touches: the microbatch's, or all of them."""
        if isinstance(step, Run) and step.task in BY_GROUP and o.slots > 1:
            return frozenset({step.microbatch})
        return frozenset(range(o.slots))


def reads(step: Step) -> tuple[str, ...]:
    """Objects whose contents in HBM a step uses."""
    match step:
        case Run() | UpdateChunk() | Rebuild():
            return step.reads
        case Exchange(op="all_reduce" | "write") | Publish() | Export():
            return (step.object,)
        case _:
            return ()


def writes(step: Step) -> tuple[str, ...]:
    """Objects whose contents in HBM a step changes."""
    match step:
        case Run() | UpdateChunk():
            return step.writes
        case Rebuild() | Exchange():
            return (step.object,)
        case _:
            return ()


def streams(step: Step) -> tuple[str, ...]:
    """Objects that a step moves piecewise over the host link."""
    return step.streams if isinstance(step, Run | UpdateChunk) else ()


def offloaded(step: Step) -> tuple[str, ...]:
    """Objects that leave in pieces while a step runs."""
    return tuple(dict.fromkeys(p.object for p in step.offloads)) if isinstance(step, Run) else ()


def moved(step: Step) -> str | None:
    """The object whose own pages a step attaches or detaches."""
    match step:
        case Map(object=name, imported=False) | Unmap(object=name, imported=False):
            return name
        case Fetch(object=name) | Offload(object=name) | Drop(object=name):
            return name
        case MapPart(object=name) | UnmapPart(object=name):
            return name
        case _:
            return None


def imports(step: Step) -> str | None:
    """The object whose imported pages a step binds or lets go."""
    return step.object if isinstance(step, Map | Unmap) and step.imported else None
