"""Static offsets: everything that is ever at the host has one place, and no two overlap in time and address.

Times are those of the replay, not those that a pass planned with. Source: design.md section 6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from rollplex.ir.check.capacity import Cuts
from rollplex.ir.check.facts import Facts
from rollplex.ir.check.held import Span, Spans
from rollplex.ir.check.rules import Violation, amount
from rollplex.ir.planned_pool import HostPlace


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
    """Two objects that can be at the host in one state lie at different addresses; no window is left out."""
    spans: dict[str, list[Span]] = {}
    for span in (s for one in held for s in one.host):
        spans.setdefault(span.object, []).append(span)
    windows = cuts.windows_of([s for found in spans.values() for s in found])
    places = facts.plan.summary.host_pool.offsets
    for p in places:
        for name in sorted(windows.get(p.object, set()) - set(p.windows)):
            yield Violation("host-offset", f"{p.object} is at the host in {name}, which it does not list", where=name)
    for a, b in combinations(places, 2):
        shared = min(a.offset + a.bytes, b.offset + b.bytes) - max(a.offset, b.offset)
        if shared > 0 and a.pool == b.pool and _meet(spans, windows, a, b):
            what = f"{a.object} and {b.object} are at the host together and share {amount(shared)}"
            yield Violation("host-overlap", what, object=a.object, nbytes=shared, where="host_pool")


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
    yield from inside(facts)
    yield from apart(facts, cuts, held)
