"""Work: every prompt group goes through prefix, suffix and backward once, with what each of them needs.

frozen     prefix m  ->  suffix m                          trained    prefix m  ->  train m  ->  prefix_backward m
with group prefix 0  ->  train 0  ->  prefix_backward 0  ->  prefix 1  ->  train 1  ->  prefix_backward 1  ->  ..
turns      prefix m  ->  prefix.2 m  -> ..  train m  ->  train.2 m  -> ..  prefix_backward.2 m  ->  prefix_backward m
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from rollplex.ir.check.facts import Facts, reads
from rollplex.ir.check.rules import At, Violation
from rollplex.ir.check.tasks import WHOLE, in_parts
from rollplex.ir.plan import PlannedObject
from rollplex.ir.steps import Run

OF_TASK = {
    "prefix": ("rx.prefix",),
    "prefix_backward": ("rx.prefix",),
    "suffix": ("rx.suffix",),
    "whole": WHOLE,
    "train": ("rx.suffix", *WHOLE),
}
"""What each task executes: every such node of its role, one a turn."""


def earlier(task: str, turn: int, turns: int) -> list[tuple[str, int]]:
    """Tasks of one role and prompt group, with their turns, that come before a task of a turn."""
    match task:
        case "prefix":
            return [("prefix", turn - 1)]
        case "suffix" | "train":
            return [("prefix", turn)]
        case "prefix_backward":
            return [("prefix_backward", turn + 1), *(("train", t) for t in range(turn, turns + 1))]
        case _:
            return []


def roles(facts: Facts) -> dict[str, tuple[str, ...]]:
    """The tasks that each role must go through: a trained role backward too; a call that is not split has one task."""
    found: dict[str, tuple[str, ...]] = {}
    for role in facts.boundaries:
        found[role] = ("prefix", "train", "prefix_backward") if role in facts.trained else ("prefix", "suffix")
    for role in (str(r.args[0]) for r in facts.plan.graph if r.op in WHOLE and r.args):
        found[role] = ("train",) if role in facts.trained else ("whole",)
    return found


def microbatches(facts: Facts) -> Iterator[Violation]:
    """Each task works exactly once on every slot of its role's boundary that it is for (paper section 3.2).

    Prefixes are for all of them, the rest for the groups that a step takes.
    """
    done = Counter((s.role, s.task, s.node, s.microbatch) for _, s in facts.groups)
    tasks_of = roles(facts)
    for role, task, node in ((r, t, n) for r, tasks in tasks_of.items() for t in tasks for n in _nodes(facts, r, t)):
        named = f"{task} %{node}" if facts.turns > 1 else task
        for m in range(facts.group_count(role) if task == "prefix" else facts.taken(role)):
            if (times := done[role, task, node, m]) != 1:
                yield Violation("microbatch", f"{named} of {role} runs {times} times for group {m}", where=role)
    for at, step in facts.groups:
        if step.task not in tasks_of.get(step.role, ()):
            yield Violation("microbatch", f"{step.role or 'no role'} has no task {step.task}", at)
        elif step.task != "prefix" and step.microbatch >= facts.taken(step.role):
            what = f"a step takes {facts.taken(step.role)} groups a rank, and it works on group {step.microbatch}"
            yield Violation("microbatch", what, at)


def _nodes(facts: Facts, role: str, task: str) -> list[str]:
    return [r.name for r in facts.plan.graph if r.op in OF_TASK[task] and r.args[:1] == (role,)]


def slots(facts: Facts) -> Iterator[Violation]:
    """Boundary and saved state have a slot for every group; a task works on one of them."""
    for at, step in facts.groups:
        boundary, groups = facts.boundaries.get(step.role), facts.group_count(step.role)
        if not 0 <= step.microbatch < groups:
            name = boundary.name if boundary and step.role not in facts.with_group else step.role
            yield Violation("slot", f"group {step.microbatch}, where {name} has {groups} slots", at, name)
    for at, step in facts.runs("load", "generate", "host", "grad_norm"):
        within = facts.by_round(step) and step.microbatch <= facts.last_round
        if step.microbatch and not in_parts(facts, step) and not within:
            yield Violation("slot", f"group {step.microbatch} of a task that works on the whole step", at)
    for o in facts.objects.values():
        boundary = facts.boundaries.get(o.role)
        whole = () if _in_groups(facts, o) else (1,)
        if o.slots > 1 and not _in_groups(facts, o):
            what = f"{o.name} has {o.slots} slots, and no prompt group has one of them"
            yield Violation("slot", what, object=o.name, where=o.name)
            continue
        if boundary is not None and o.slots not in (*whole, boundary.slots):
            what = f"{o.name} has {o.slots} slots, {boundary.name} has {boundary.slots}"
            yield Violation("slot", what, object=o.name, where=o.name)


def _in_groups(facts: Facts, o: PlannedObject) -> bool:
    """Whether an object has a slot for every prompt group: a boundary's piece, or what its prefix saves."""
    return o in facts.pieces.get(o.role, ()) or o in facts.saved.get(o.role, ())


def attached(facts: Facts) -> Iterator[Violation]:
    """Reference outputs are detached, the training boundary stays attached (paper section 3.1)."""
    for o in facts.objects.values():
        if o.attached and o.class_ not in ("boundary", "phase-local"):
            yield Violation("attached", f"{o.name} is {o.class_} and attached", object=o.name, where=o.name)
        elif o.attached and o.role not in facts.trained:
            yield Violation("attached", f"{o.name} is attached, {o.role} is not trained", object=o.name, where=o.name)
        if o.recomputable and o not in facts.saved.get(o.role, ()):
            yield Violation("attached", f"{o.name} is recomputable, and no saved state", object=o.name, where=o.name)
    made = {n for _, s in facts.runs("prefix") for n in (*s.writes, *s.streams)}
    for o in facts.objects.values():
        kept = o.class_ == "phase-local" and o.attached and not o.recomputable
        if o.name not in made and (kept or o.class_ == "boundary"):
            yield Violation("attached", f"{o.name} is {o.class_}, and no prefix makes it", object=o.name, where=o.name)
    for o in (o for found in facts.pieces.values() for o in found):
        if o.attached != (o.role in facts.trained):
            says = "attached" if o.attached else "detached"
            yield Violation("attached", f"{o.name} is {says}", object=o.name, where=o.name)


def task_order(facts: Facts) -> Iterator[Violation]:
    """A group's boundary exists before its suffix; its gradient is complete before it enters the prefix."""
    turn = facts.turn
    first = {(s.role, s.microbatch, s.task, turn.get(s.node, 1)): at for at, s in reversed(facts.groups)}
    for (role, m, task, here), at in first.items():
        for before in earlier(task, here, facts.turns):
            other = first.get((role, m, *before))
            if other is not None and other.index > at.index:
                yield Violation("task-order", f"it runs before {other}", at)


def one_group(facts: Facts) -> Iterator[Violation]:
    """Of a role whose prefix runs with its group one group has boundary and saved state, until its backward is done."""
    trains = {s.role: s.window for _, s in facts.runs("train")}
    held = dict.fromkeys(facts.with_group, -1)  # the group in the room of its role; -1 where it is free
    for at, step in (found for found in facts.groups if found[1].role in held):
        group, role = held[step.role], step.role
        if step.task == "prefix" and group >= 0:
            yield Violation("one-group", f"it takes the room of group {group}, whose backward is still to come", at)
        elif step.task != "prefix" and group != step.microbatch:
            has = f"group {group} has the room of {role}" if group >= 0 else f"no group has the room of {role}"
            yield Violation("one-group", f"{has}, and it works on group {step.microbatch}", at)
        if step.task == "prefix" and step.window != trains.get(role):
            yield Violation("one-group", f"{role} trains in {trains.get(role, 'no window')}, its prefix runs apart", at)
        held[role] = -1 if step.task == "prefix_backward" else step.microbatch


def saved_state(facts: Facts) -> Iterator[Violation]:
    """Offloading or dropping saved state keeps the serial autograd path (paper section 3.2)."""
    prefixes = {(s.role, s.node, s.microbatch): s for _, s in facts.runs("prefix")}
    for at, backward in facts.runs("prefix_backward"):
        o, prefix = facts.saved_by(backward), prefixes.get((backward.role, backward.node, backward.microbatch))
        if o is None or prefix is None:
            continue
        made, used = o.name in (*prefix.writes, *prefix.streams), o.name in (*reads(backward), *backward.streams)
        if made and not used:
            yield Violation("saved-state", f"it does not use {o.name}, which its prefix has kept", at, o.name)
        elif not made and used:
            yield Violation("saved-state", f"it uses {o.name}, which its prefix has not kept", at, o.name)
        elif not made and not o.recomputable:
            yield Violation("saved-state", f"{o.name} is neither kept nor recomputable", at, o.name)
        yield from _weights_again(facts, at, backward, prefix)


def _weights_again(facts: Facts, at: At, backward: Run, prefix: Run) -> Iterator[Violation]:
    """Backward reads the weights that forward read and the base beside adapters; recomputing reads all of them."""
    kept = facts.saved_by(backward)
    assert kept is not None
    recomputes = kept.name not in (*backward.reads, *backward.streams)
    for name in prefix.reads:
        needed = (
            name in facts.theta or name in facts.bases or (recomputes and facts.objects[name].class_ == "regenerable")
        )
        if needed and name not in backward.reads:
            yield Violation("task-objects", f"it reads no {name}, which its prefix read", at, object=name)


CHECKS: tuple[Callable[[Facts], Iterator[Violation]], ...] = (
    microbatches, slots, attached, task_order, one_group, saved_state,
)  # fmt: skip


def check_work(facts: Facts) -> tuple[Violation, ...]:
    """Everything that is wrong with the work of an iteration."""
    return tuple(v for check in CHECKS for v in check(facts))
