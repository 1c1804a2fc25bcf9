"""Races: what one process changes while another may still use it, by the partial order of all steps.

train     .. update_chunk actor 0 ..        writes actor.snapshot
rollout   .. run generate ..                reads it: one of the two must be before the other
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from rollplex.ir.check.capacity import Cuts
from rollplex.ir.check.facts import THETA_QUIET, Facts, moved, reads, writes
from rollplex.ir.check.held import Spans
from rollplex.ir.check.order import Order
from rollplex.ir.check.rules import At, Violation
from rollplex.ir.plan import PlannedObject
from rollplex.ir.steps import Run, UpdateChunk


def check_races(facts: Facts, order: Order, cuts: Cuts, held: Mapping[str, Spans]) -> Iterator[Violation]:
    """Every shared object: its owner's changes against its readers' uses (paper sections 3.1 and 3.2)."""
    changes = _changes(facts)
    for o in facts.objects.values():
        for reader in o.readers:
            yield from _uses(facts, order, o, reader, changes.get(o.name, []))
            yield from _contents(facts, cuts, o, reader, held[o.process])
    yield from _after_quiet(facts)


def _changes(facts: Facts) -> dict[str, list[At]]:
    """Steps that move or write each object, in order; only its owner has such steps."""
    found: dict[str, list[At]] = {}
    for at in facts.steps():
        for name in {moved(at.step), *writes(at.step)} - {None}:
            assert name is not None
            found.setdefault(name, []).append(at)
    return found


def _uses(facts: Facts, order: Order, o: PlannedObject, reader: str, changes: list[At]) -> Iterator[Violation]:
    """A use by a reader races with every change that is neither before nor after it; the first one is told."""
    indices = [c.index for c in changes]
    for at in facts.steps(reader):
        if o.name not in reads(at.step):
            continue
        done = order.need[reader][at.index][o.process]
        rest = changes[bisect_left(indices, done) :]
        if rest and not order.before(at, rest[0]):
            yield Violation("race", f"it may change {o.name} while {at} uses it", rest[0], o.name, o.bytes)
            return


def _contents(facts: Facts, cuts: Cuts, o: PlannedObject, reader: str, held: Spans) -> Iterator[Violation]:
    """Whenever a reader uses an object, its owner has it in HBM, with contents."""
    for at in (at for at in facts.steps(reader) if o.name in reads(at.step)):
        first = cuts.interval(reader, o.process, at.index).start
        last = cuts.interval(reader, o.process, at.index + 1).stop - 1
        for kind, spans in (("not-mapped", held.pages), ("not-produced", held.contents)):
            if not any(s.object == o.name and s.covers(first, last) for s in spans):
                what = f"it reads {o.name}, which {o.process} may not have {kind.removeprefix('not-')} by then"
                yield Violation(kind, what, at, o.name, o.bytes)
                break


def _after_quiet(facts: Facts) -> Iterator[Violation]:
    """Barrier theta-quiet stands between the last read of theta_k and the first chunk (paper section 3.1)."""
    for at in facts.steps():
        late = facts.past(at, THETA_QUIET)
        if isinstance(at.step, UpdateChunk) and not late:
            yield Violation("update-before-quiet", "engines may still read theta_k", at)
        if isinstance(at.step, Run) and late:
            used = [n for n in reads(at.step) if n in facts.theta]
            if used:
                yield Violation(
                    "read-after-quiet", f"it reads {used[0]}, which may mix theta_k and theta_k+1", at, used[0]
                )
