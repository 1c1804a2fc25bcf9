"""The verdict: feasible when every window fits both capacities; else the first that does not, and what fills it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from rollplex.ir.check.facts import Facts
from rollplex.ir.check.node import on_node
from rollplex.ir.check.rules import Violation
from rollplex.ir.errors import RollplexError
from rollplex.ir.job_file import change_job
from rollplex.ir.plan import Infeasible, WindowSummary
from rollplex.ir.planned_job import job_of

Over = tuple[str, WindowSummary, int]
"""A resource, a window over its capacity, and the bytes that it lacks."""


def of_pools(facts: Facts, sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of these objects on a GPU of each pool: an object lies where its owner runs."""
    pool = {process: kind.pool for process, kind in facts.plan.processes.items()}
    total = dict.fromkeys(facts.pools, 0)
    for name, nbytes in sizes.items():
        if pool[facts.objects[name].process]:
            total[pool[facts.objects[name].process]] += nbytes
    return total


def check_verdict(facts: Facts) -> Iterator[Violation]:
    """Feasible means that every window fits both capacities; an infeasible plan explains the first that does not."""
    plan, over = facts.plan, _first_over(facts)
    if plan.feasible and over:
        yield Violation("feasible", f"feasible, and {over[0][1].name} is over capacity", nbytes=over[0][2])
    if not plan.feasible and not over:
        yield Violation("feasible", "infeasible, and every window fits")
    if plan.feasible != (plan.infeasible is None):
        says = "an" if plan.infeasible else "no"
        yield Violation("infeasible", f"feasible is {plan.feasible}, and there is {says} explanation")
    if plan.infeasible is None:
        return
    yield from _explained(facts, plan.infeasible, over[0] if over else None)


def _explained(facts: Facts, why: Infeasible, right: Over | None) -> Iterator[Violation]:
    """HBM is told before the host; the objects are those of the window, the largest first."""
    if right is None or (right[0], right[1].name, right[2]) != (why.resource, why.window, why.shortfall_bytes):
        told = f"{why.window} lacks {why.shortfall_bytes:,} bytes of {why.resource}"
        truth = f"{right[1].name} is first and lacks {right[2]:,} of {right[0]}" if right else "no window lacks any"
        yield Violation("infeasible", f"{told}; by the windows {truth}", where=why.window)
        return
    w = right[1]
    there = {o.name: o.bytes for o in facts.objects.values() if o.host_backed or o.residency.get(w.name) == "host"}
    lists = {"hbm": w.by_object, "host": there, "node": on_node(facts, w.name)}
    held = lists["node"] if right[0] == "node" else _in_fullest(facts, lists[right[0]])
    listed = [(o.name, o.bytes) for o in why.objects]
    if dict(listed) != held or len(listed) != len(held):
        yield Violation("infeasible", "its objects are not those of the window", where=why.window)
    if [n for _, n in listed] != sorted((n for _, n in listed), reverse=True):
        yield Violation("infeasible", "its objects do not come by size", where=why.window)
    for change, count in Counter(r.change for r in why.remedies).items():
        if count > 1:
            yield Violation("infeasible", f"the remedy `{change}` is there {count} times", where=why.window)
    for remedy in why.remedies:
        try:
            change_job(job_of(facts.plan), remedy.change.split(" "))
        except RollplexError as error:
            what = f"the job refuses `{remedy.change}`: {error.problems[0].what}"
            yield Violation("infeasible", what, where=why.window)


def _in_fullest(facts: Facts, sizes: dict[str, int]) -> dict[str, int]:
    """Those of these objects that are on a GPU of the pool that holds most of them."""
    total, pools = of_pools(facts, sizes), facts.pools
    fullest = pools[max(pools, key=lambda p: total[p])] if pools else ()
    return {name: nbytes for name, nbytes in sizes.items() if facts.objects[name].process in fullest}


def _first_over(facts: Facts) -> list[Over]:
    """The first window over each capacity, and by how much."""
    s = facts.plan.summary
    over = [("hbm", w, w.hbm_bytes - s.capacity_bytes) for w in s.windows]
    over += [("host", w, w.host_bytes - s.host_capacity_bytes) for w in s.windows]
    found = {}
    for resource, w, more in over:
        if more > 0 and resource not in found:
            found[resource] = (resource, w, more)
    if s.windows and (more := s.node.total_bytes - s.node.capacity_bytes) > 0:
        found["node"] = ("node", max(s.windows, key=lambda w: w.host_bytes), more)
    return list(found.values())
