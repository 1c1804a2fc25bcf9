"""Tail cutting: of the prompt groups sampled, a step takes some; what the others leave behind is kept, or discarded.

    oversample   generate 40 groups                          32 trained on, 8 discarded
    partial      generate 40 groups, 8 of them carried in    32 trained on, 8 carried out: streams rollout.carried
Source: paper section 4.7.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.ir.check.facts import Facts, reads, streams, writes
from rollplex.ir.check.rules import Violation
from rollplex.ir.plan import Tail


def groups(facts: Facts, tail: Tail) -> Iterator[Violation]:
    """More groups are sampled than taken, both dealt out evenly to ranks, with a slot for each that is prefixed."""
    if not 0 < tail.taken < tail.sampled:
        yield Violation("tail", f"{tail.sampled} prompt groups are sampled, {tail.taken} taken", where="summary.tail")
        return
    early = {s.role for at, s in facts.runs("prefix") if at.step.window.startswith("P1")}
    for role, o in facts.boundaries.items():
        ranks, wanted = facts.plan.processes[o.process].copies(role), tail.sampled if role in early else tail.taken
        if not ranks or wanted % ranks or tail.taken % ranks or o.slots != wanted // ranks:
            what = f"{o.name} has {o.slots} slots for {wanted} prompt groups over {ranks} ranks, {tail.taken} taken"
            yield Violation("tail", what, object=o.name, where=o.name)


def carried(facts: Facts, tail: Tail | None) -> Iterator[Violation]:
    """Unfinished responses outlast the step where they go on, and only `generate` touches them."""
    name = tail.carried if tail else ""
    if tail is not None and (tail.kind == "partial") != bool(name):
        what = f"{tail.kind} rollout carries {name or 'nothing'} into the next step"
        yield Violation("tail", what, where="summary.tail")
    o = facts.objects.get(name)
    if name and (o is None or o.class_ != "permanent"):
        what = f"{name} is {o.class_ if o else 'no object'}; what the next step goes on with is permanent"
        yield Violation("tail", what, object=name, where="summary.tail")
    for at, step in facts.runs("generate"):
        if o is not None and name not in (*step.streams, *set(step.reads) & set(step.writes)):
            yield Violation("tail", f"it neither takes up nor leaves {name}", at, name)
    for at in facts.steps():
        used = name in (*reads(at.step), *writes(at.step), *streams(at.step))
        if o is not None and used and getattr(at.step, "task", "") != "generate":
            yield Violation("tail", f"it touches {name}, which only decode goes on with", at, name)


def check_tail(facts: Facts) -> Iterator[Violation]:
    """Everything that is wrong with responses that a step does not wait for."""
    tail = facts.plan.summary.tail
    if tail is not None:
        yield from groups(facts, tail)
    yield from carried(facts, tail)
