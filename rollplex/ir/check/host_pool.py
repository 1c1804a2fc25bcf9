"""Static offsets: everything that is ever at the host has one place, and no two overlap in time and address.

Times are those of the replay, not those that a pass planned with. A run frees no place before the last use of what is
in it, wherever that is by then, and none of what outlives an iteration. Source: design.md section 6.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from rollplex.ir.check.capacity import Cuts
from rollplex.ir.check.facts import Facts
from rollplex.ir.check.held import LASTING, Span, Spans
from rollplex.ir.check.rules import Violation, amount
from rollplex.ir.planned_pool import HostPlace
from rollplex.ir.steps import named


def placed(facts: Facts) -> Iterator[Violation]:
    """One place for each object that is ever at the host, as large as the object, in its own pool."""
    found = Counter(p.object for p in facts.plan.summary.host_pool.offsets)
    for o in facts.objects.values():
        needs = o.host_backed or "host" in o.residency.values()
        if found[o.name] != needs:
            what = f"{o.name} is {'at the host' if needs else 'never at the host'} and has {found[o.name]} places"
            yield Violation("host-offset", what, object=o.name, nbytes=o.bytes, where="host_pool")
    for p in facts.plan.summary.host_pool.offsets:
        o = facts.objects.get(p.object)
        if o is None:
            yield Violation("host-offset", f"the plan has no object {p.object}", object=p.object, where="host_pool")
        elif p.bytes != o.bytes or p.pool != facts.plan.processes[o.process].pool:
            what = f"its place has {p.bytes:,} bytes in pool {p.pool}, {o.name} has {o.bytes:,}"
            yield Violation("host-offset", what, object=o.name, nbytes=o.bytes, where="host_pool")


def whole_pages(facts: Facts) -> Iterator[Violation]:
    """The objects of a pool are whole pages, and each begins on one: at other places no engine has a tensor."""
    places = facts.plan.summary.host_pool.offsets
    for pool in dict.fromkeys(p.pool for p in places):
        own = [p for p in places if p.pool == pool]
        page = math.gcd(*(p.bytes for p in own))
        for p in (p for p in own if page and p.offset % page):
            what = f"{p.object} begins at byte {p.offset:,}; all objects of {pool} are multiples of {page:,} bytes"
            yield Violation("host-offset", what, object=p.object, nbytes=p.bytes, where="host_pool")


def inside(facts: Facts) -> Iterator[Violation]:
    """Places end where the pool ends, at most, and one of them there; its bound is not above it."""
    pool = facts.plan.summary.host_pool
    top = max((p.offset + p.bytes for p in pool.offsets), default=0)
    if top != pool.bytes:
        yield Violation("host-offset", f"the pool has {pool.bytes:,} bytes, its places end at {top:,}", nbytes=top)
    if pool.bound_bytes > pool.bytes or (pool.status == "optimal") != (pool.bound_bytes == pool.bytes):
        what = f"{pool.status}, with {pool.bytes:,} bytes and a bound of {pool.bound_bytes:,}"
        yield Violation("host-offset", what, nbytes=pool.bytes, where="host_pool")


def apart(facts: Facts, cuts: Cuts, held: Sequence[Spans]) -> Iterator[Violation]:
    """Two objects that can be at the host in one state lie at different addresses; the windows are those of states."""
    spans = _spans(facts, held)
    windows = cuts.windows_of([s for found in spans.values() for s in found])
    places = facts.plan.summary.host_pool.offsets
    for p in places:
        yield from _listed(facts, p, windows.get(p.object, set()))
    for a, b in combinations(places, 2):
        shared = min(a.offset + a.bytes, b.offset + b.bytes) - max(a.offset, b.offset)
        if shared > 0 and a.pool == b.pool and _meet(spans, windows, a, b):
            what = f"{a.object} and {b.object} are at the host together and share {amount(shared)}"
            yield Violation("host-overlap", what, object=a.object, nbytes=shared, where="host_pool")


def _spans(facts: Facts, held: Sequence[Spans]) -> dict[str, list[Span]]:
    """When each object has its place: from its first copy to its last use, or for ever."""
    last = {(at.process, name): at.index for at in facts.steps() for name in named(at.step)}
    found: dict[str, list[Span]] = {}
    for span in (s for one in held for s in one.host):
        first, stop = span.first, last.get((span.process, span.object), span.last)
        if facts.objects[span.object].class_ in LASTING:
            first, stop = 0, len(facts.programs[span.process])
        found.setdefault(span.object, []).append(replace(span, first=first, last=max(stop, span.last)))
    return found


def _listed(facts: Facts, p: HostPlace, there: set[str]) -> Iterator[Violation]:
    """A place lists the windows that need it, and where it is first copied at the end of one, that one too."""
    for name in sorted(there - set(p.windows)):
        yield Violation("host-offset", f"{p.object} is at the host in {name}, which it does not list", where=name)
    first = min((facts.windows.index(w) for w in there), default=0)
    for name in sorted(set(p.windows) - there - set(facts.windows[first - 1 : first])):
        yield Violation("host-offset", f"{p.object} is not at the host in {name}, which it lists", where=name)


def _meet(spans: dict[str, list[Span]], windows: dict[str, set[str]], a: HostPlace, b: HostPlace) -> bool:
    """Whether both can be there in one state; of two programs only the windows are compared."""
    for one in spans.get(a.object, ()):
        for other in spans.get(b.object, ()):
            if one.process != other.process:
                if windows[a.object] & windows[b.object]:
                    return True
            elif max(one.first, other.first) <= min(one.last, other.last):
                return True
    return False


def check_host_pool(facts: Facts, cuts: Cuts, held: Sequence[Spans]) -> Iterator[Violation]:
    """Everything that is wrong with the static offsets."""
    yield from placed(facts)
    yield from whole_pages(facts)
    yield from inside(facts)
    yield from apart(facts, cuts, held)
