"""Faults of the static offsets: places left out, too small, outside the pool, or shared at one time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations
from typing import Any

from mutants.edit import mutant, objects, summarise
from rollplex.ir.plan import Plan
from rollplex.ir.planned_pool import LASTING, HostPlace


def with_pool(plan: Plan, **fields: Any) -> Plan:
    """The plan with another pinned pool."""
    return summarise(plan, host_pool=plan.summary.host_pool.model_copy(update=fields))


def with_place(plan: Plan, name: str, **fields: Any) -> Plan:
    """The plan with other fields in one place."""
    places = plan.summary.host_pool.offsets
    return with_pool(plan, offsets=tuple(p.model_copy(update=fields) if p.object == name else p for p in places))


def places(plan: Plan) -> tuple[HostPlace, ...]:
    return plan.summary.host_pool.offsets


@mutant("host-offset")
def place_left_out(plan: Plan) -> Iterator[Plan]:
    for p in places(plan):
        yield with_pool(plan, offsets=tuple(other for other in places(plan) if other is not p))


@mutant("host-offset")
def place_given_twice(plan: Plan) -> Iterator[Plan]:
    for p in places(plan):
        yield with_pool(plan, offsets=(*places(plan), p))


@mutant("host-offset")
def place_of_another_size(plan: Plan) -> Iterator[Plan]:
    for p in places(plan):
        yield with_place(plan, p.object, bytes=p.bytes - 1)
        yield with_place(plan, p.object, pool="elsewhere")


@mutant("host-offset")
def place_for_what_is_never_there(plan: Plan) -> Iterator[Plan]:
    listed = {p.object for p in places(plan)}
    for name in [next((n for n in objects(plan) if n not in listed), "nothing"), "nothing"]:
        for p in places(plan)[:1]:
            yield with_pool(plan, offsets=(*places(plan), p.model_copy(update={"object": name, "bytes": 0})))


@mutant("host-offset")
def pinned_pool_of_another_size(plan: Plan) -> Iterator[Plan]:
    pool = plan.summary.host_pool
    if pool.offsets:
        yield with_pool(plan, bytes=pool.bytes + 1, bound_bytes=min(pool.bound_bytes, pool.bytes + 1))
        yield with_pool(plan, bytes=pool.bytes - 1, bound_bytes=min(pool.bound_bytes, pool.bytes - 1))


@mutant("host-offset")
def pinned_pool_proven_wrongly(plan: Plan) -> Iterator[Plan]:
    pool = plan.summary.host_pool
    yield with_pool(plan, bound_bytes=pool.bytes + 1)
    yield with_pool(plan, status="feasible" if pool.status == "optimal" else "optimal")


@mutant("host-offset")
def window_of_a_place_left_out(plan: Plan) -> Iterator[Plan]:
    for p in places(plan):
        for w, place in objects(plan)[p.object].residency.items():
            if place == "host":
                yield with_place(plan, p.object, windows=tuple(name for name in p.windows if name != w))


@mutant("host-overlap")
def places_at_the_same_addresses(plan: Plan) -> Iterator[Plan]:
    """Two objects that are at the host in one window, one moved onto the other."""
    for a, b in permutations(places(plan), 2):
        one, other = objects(plan)[a.object].residency, objects(plan)[b.object].residency
        if a.pool == b.pool and any(one[w] == other[w] == "host" for w in one):
            yield with_place(plan, a.object, offset=max(b.offset + b.bytes - 1, 0))
            yield with_place(plan, a.object, offset=b.offset)


@mutant("host-overlap", "host-offset")
def places_change_places(plan: Plan) -> Iterator[Plan]:
    """Two places of different sizes: one of them lies in a neighbour's, or behind the pool's end."""
    for a, b in combinations(places(plan), 2):
        if a.pool == b.pool and a.bytes != b.bytes and a.offset != b.offset:
            yield with_place(with_place(plan, a.object, offset=b.offset), b.object, offset=a.offset)


@mutant("host-offset")
def place_off_its_page(plan: Plan) -> Iterator[Plan]:
    """A byte higher, as far as the pool reaches: no other is in the way of what lies alone in it."""
    for p in places(plan):
        if p.bytes > 1 and p.offset + p.bytes < plan.summary.host_pool.bytes:
            yield with_place(plan, p.object, offset=p.offset + 1)


@mutant("host-offset")
def window_of_a_place_too_many(plan: Plan) -> Iterator[Plan]:
    """Of what is there for a while; the run's log has it in fewer."""
    names = tuple(w.name for w in plan.summary.windows)
    for p in places(plan):
        if names[-1] not in p.windows:
            yield with_place(plan, p.object, windows=(*p.windows, names[-1]))


@mutant("host-overlap")
def gradients_over_state_that_is_in_hbm(plan: Plan) -> Iterator[Plan]:
    """What outlives an iteration keeps its place, also while nothing valid is in it."""
    held = {p.object: p for p in places(plan)}
    for p in places(plan):
        if objects(plan)[p.object].class_ in LASTING and (own := held.get("actor.gradients")) and own.pool == p.pool:
            yield with_place(plan, "actor.gradients", offset=p.offset)
