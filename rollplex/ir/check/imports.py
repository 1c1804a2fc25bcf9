"""Imports: pages that one process maps from another, which the owner keeps where they are meanwhile.

    rollout   [ imported for the whole run ........................................ ]    readers, and no step says more
    rollout   generate | unmap actor.snapshot (imported)             map actor.snapshot (imported)    explicit: train
    train                             drop | map | update_chunk ..                                    may remap it
    train     unmap (imported) | barrier | unmap | .. | export | map (imported) | exchange write    peers' pages
Before the first iteration everybody binds what it imports, so each iteration begins bound, and ends so. Ranks that
write into each other's pages run one program: what one rank has let go of, all have behind their next barrier.
Source: paper section 3.2 (stable-address staging) and section 3.3 (binding and refresh).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from rollplex.ir.check.facts import Facts, imports, moved, reads
from rollplex.ir.check.order import Order
from rollplex.ir.check.rules import At, Violation
from rollplex.ir.plan import PlannedObject
from rollplex.ir.steps import Barrier, Exchange


@dataclass(frozen=True)
class Binding:
    """The steps between which a reader has an owner's pages; None is an end of the iteration."""

    first: At | None
    last: At | None

    def holds(self, at: At) -> bool:
        """Whether a step of the reader stands inside."""
        return (self.first is None or self.first.index < at.index) and (self.last is None or at.index < self.last.index)

    def apart(self, order: Order, move: At) -> bool:
        """Whether a step of the owner is before or after all of it."""
        before = self.first is not None and order.before(move, self.first)
        return before or (self.last is not None and order.before(self.last, move))


def bindings(steps: list[At]) -> tuple[list[Binding], list[Violation]]:
    """The bindings that a reader's explicit steps make; without any it has the pages for the whole run."""
    found, wrong = list[Binding](), list[Violation]()
    since: At | None = None
    bound = starts_bound = not steps or steps[0].step.kind == "unmap"
    if not starts_bound:
        name = imports(steps[0].step) or ""
        wrong.append(Violation("import-start", f"{name} is imported since before the iteration", steps[0], name))
    for at in steps:
        maps, name = at.step.kind == "map", imports(at.step) or ""
        if maps == bound:
            kind, what = ("double-map", "is imported already") if maps else ("not-held", "is not imported")
            wrong.append(Violation(kind, f"{name} {what}", at, name))
        elif not maps:
            found.append(Binding(since, at))
        since, bound = (at if maps else None), maps
    if bound:
        found.append(Binding(since, None))
    if bound != starts_bound:
        what = "it is imported at the end of an iteration and not at its start, or the other way round"
        wrong.append(Violation("end-state", what, steps[-1], imports(steps[-1].step) or ""))
    return found, wrong


def check_imports(facts: Facts, order: Order) -> Iterator[Violation]:
    """Importers use pages while they have them, owners move them while nobody has."""
    moves: dict[str, list[At]] = {}
    for at in facts.steps():
        moves.setdefault(moved(at.step) or "", []).append(at)
    for o in facts.objects.values():
        importers = facts.importers[o.name]
        if importers and o.start != "hbm":
            what = f"{', '.join(importers)} imports {o.name} before the iteration, when it has no pages"
            yield Violation("import-start", what, None, o.name, o.bytes, where=f"{o.process}, {o.name}")
        for importer in importers:
            own = [at for at in facts.steps(importer) if imports(at.step) == o.name]
            found, wrong = bindings(own)
            yield from wrong
            yield from _uses(facts, o, importer, found)
            apart = partial(_peers_apart, facts) if importer == o.process else partial(Binding.apart, order=order)
            for move in moves.get(o.name, []):
                if not all(apart(b, move=move) for b in found):
                    who = f"another rank of {importer}" if importer == o.process else importer
                    yield Violation("imported-pages", f"{who} may have {o.name} mapped", move, o.name, o.bytes)


def _uses(facts: Facts, o: PlannedObject, importer: str, found: list[Binding]) -> Iterator[Violation]:
    for at in facts.steps(importer):
        peers = isinstance(at.step, Exchange) and at.step.op == "write"
        used = o.name in reads(at.step) and (peers or importer != o.process)
        if used and not any(b.holds(at) for b in found):
            whose = "its peers' pages of " if peers else ""
            yield Violation("not-imported", f"{importer} has not imported {whose}{o.name} here", at, o.name, o.bytes)


def _peers_apart(facts: Facts, binding: Binding, move: At) -> bool:
    """Whether a rank moves its pages before its peers take them, or when all ranks have let go and met since."""
    if binding.first is not None and move.index < binding.first.index:
        return True
    met = (at.index for at in facts.steps(move.process) if isinstance(at.step, Barrier))
    return binding.last is not None and any(binding.last.index < at < move.index for at in met)
