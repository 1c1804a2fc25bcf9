"""What would make an infeasible job fit: the smallest change of each key, then pairs, each compiled again and checked.

    roles.actor.rollout.kv_cache_gib=37.5      frees 6.5 GiB   step +0 s
    workload.prompts=40                        frees 3.6 GiB   step -37.6 s, a prompt 0.6 % dearer

Data        J        the job that is over           L     its levers, each with steps v[1], v[2], .. ever more drastic
            fits(J)  whether every object has a place               lack(J)   what sizes alone lack; both of relax.py
            left(l)  lack(J + the most drastic step of l)
Single      for l in L: the least i with fits(J + v[i]), by bisection; only that is compiled to a plan
Pairs       for l, l' in L that lessen lack(J), with left(l)[w] + left(l')[w] <= lack(J)[w] in every window w, where l
            does not suffice and l' is not enough at its mildest: l at its most drastic, the least v'[i] that fits
            beside it, then the least v[i] that fits beside that
Rank        what keeps the prompts whole before what cuts them; then GPU seconds a prompt; then what buys no machine;
            then the fewest changes.
Bisection takes it that a more drastic step frees more; where that is wrong a remedy is missed, never a wrong one told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from rollplex.ir.errors import JobError, RollplexError
from rollplex.ir.job import Job
from rollplex.ir.job_file import change_job
from rollplex.ir.module import Module
from rollplex.ir.plan import Plan, Remedy, Resource
from rollplex.passes.lever import Lever, Overrides, key_of
from rollplex.passes.levers import levers
from rollplex.passes.node_memory import kept
from rollplex.passes.relax import has_room, lack

KEEP = 6
ENOUGH = 3
"""With so many single changes that keep the work and the machines as they are, pairs are not looked for."""
MOST_PLANS, MOST_PAIRS = 40, 60
"""Jobs compiled in full and pairs tried for one infeasible job, at most; counts and no clock, so that plans repeat."""
MACHINES = frozenset({"cluster.nodes", "cluster.host_memory_gb", "cluster.capacity_gib"})
"""Keys that are bought and not set."""


class Compiler(Protocol):
    """The pipeline, as far as remedies need it. Any of these raises RollplexError for a job that it refuses."""

    def lifetimes(self, job: Job) -> Module:
        """The module as far as its state contract; nothing is placed."""
        ...

    def plan(self, job: Job) -> Plan | None:
        """The whole plan; None as soon as it is known not to fit."""
        ...

    def check(self, plan: Plan) -> None:
        """Put a plan through the checker."""
        ...


@dataclass(frozen=True)
class Found:
    """Overrides that make the job fit, and the plan they give."""

    overrides: Overrides
    plan: Plan


@dataclass(frozen=True)
class Trial:
    """What is known of a changed job without its plan; `lack` is None where it is refused by the job or a pass."""

    lack: dict[str, int] | None
    fits: bool = False


REFUSED = Trial(None)


@dataclass
class Search:
    """One infeasible job; what was tried is remembered, because pairs come back to the same jobs."""

    job: Job
    compiler: Compiler
    _jobs: dict[Overrides, Job | None] = field(default_factory=dict)
    _trials: dict[frozenset[str], Trial] = field(default_factory=dict)
    _plans: dict[frozenset[str], Plan | None] = field(default_factory=dict)

    def changed(self, overrides: Overrides) -> Job | None:
        """The job with overrides; None where the job refuses them."""
        if overrides not in self._jobs:
            self._jobs[overrides] = self._changed(overrides)
        return self._jobs[overrides]

    def _changed(self, overrides: Overrides) -> Job | None:
        try:
            return change_job(self.job, overrides)
        except JobError:
            return None

    def trial(self, overrides: Overrides) -> Trial:
        """Whether the changed job fits, and what it lacks."""
        key = frozenset(overrides)
        if key not in self._trials:
            job = self.changed(overrides)
            self._trials[key] = REFUSED if job is None else self._tried(job)
        return self._trials[key]

    def _tried(self, job: Job) -> Trial:
        try:
            module = self.compiler.lifetimes(job)
            lacking = lack(module)  # it spares the solver what cannot fit
            return Trial(lacking, not lacking and has_room(module))
        except RollplexError:
            return REFUSED  # a change under which nothing can be compiled, or not in time, is no remedy

    def fits(self, overrides: Overrides) -> bool:
        """Whether the changed job fits."""
        return self.trial(overrides).fits

    def found(self, overrides: Overrides) -> Found | None:
        """The overrides with their plan, if they fit."""
        key = frozenset(overrides)
        if not self.fits(overrides):
            return None
        if key not in self._plans:
            job = self.changed(overrides)
            assert job is not None
            self._plans[key] = self._plan(job) if len(self._plans) < MOST_PLANS else None
        plan = self._plans[key]
        return Found(overrides, plan) if plan else None

    def _plan(self, job: Job) -> Plan | None:
        try:
            plan = self.compiler.plan(job)
        except RollplexError:
            return None  # out of time, or refused by a pass: not shown to fit
        return plan if plan and plan.feasible else None

    def least(self, before: Overrides, lever: Lever) -> Found | None:
        """The mildest value of a lever that fits beside other overrides."""
        if len(lever.steps) <= 2:  # so few need not be ever more drastic: schedules are not
            return next((f for v in lever.steps if (f := self.found((*before, *v)))), None)
        most, compiles = self.extreme(lever, before), lambda v: self.found(v) is not None
        holds = compiles if self.fits(()) else self.fits  # a job whose places fit lacks what only a plan can tell
        if most is None or not holds(most):
            return None
        legal = [v for step in lever.steps if self.changed(v := (*before, *step)) is not None]
        found = self.found(legal[bisect(len(legal), lambda k: holds(legal[k]))])
        if found or not compiles(most):
            return found
        return self.found(legal[bisect(len(legal), lambda k: compiles(legal[k]))])

    def needs_all(self, found: Found) -> bool:
        """Whether none of the overrides can be left out."""
        o = found.overrides
        fewer = [(*o[:i], *o[i + 1 :]) for i in range(len(o))]
        return not any(self.changed(f) is not None and self.fits(f) for f in fewer if f)

    # ---- singles and pairs

    @cached_property
    def levers(self) -> tuple[Lever, ...]:
        """L."""
        return levers(self.job)

    @cached_property
    def singles(self) -> dict[int, Found]:
        """What suffices alone, by position in L."""
        found = {i: self.least((), lever) for i, lever in enumerate(self.levers)}
        return {i: f for i, f in found.items() if f}

    def extreme(self, lever: Lever, beside: Overrides = ()) -> Overrides | None:
        """The most drastic legal step."""
        steps = ((*beside, *step) for step in reversed(lever.steps))
        return next((step for step in steps if self.changed(step) is not None), None)

    @cached_property
    def left(self) -> dict[int, dict[str, int]]:
        """lack(J + l) by position in L, of levers with a legal step."""
        extremes = {i: self.extreme(lever) for i, lever in enumerate(self.levers)}
        lacks = {i: self.trial(e).lack for i, e in extremes.items() if e is not None}
        return {i: lack for i, lack in lacks.items() if lack is not None}

    def pairs(self) -> Iterator[Found]:
        """Two decisions that suffice together and not alone, those that keep the work before those that lessen it."""
        together = [(i, j) for i in self.left for j in self.left if i not in self.singles and self._promises(i, j)]
        together.sort(key=lambda t: max(lessens(self.levers[k].steps[0]) for k in t))
        seen = set[frozenset[str]]()
        for first, second in ((self.levers[i], self.levers[j]) for i, j in together[:MOST_PAIRS]):
            keys = first.keys | second.keys
            if keys not in seen and len(seen) < KEEP and (found := self._pair(first, second)):
                seen.add(keys)
                yield found

    def _promises(self, i: int, j: int) -> bool:
        """Whether a pair can be enough: each helps, and what each leaves of every window, the other can take away."""
        first, second, base = self.levers[i], self.levers[j], self.trial(()).lack or {}
        both = (*first.steps[0], *second.steps[0])
        if first.keys & second.keys or not self._goes_on(j) or (lessens(both) and buys(both)):
            return False
        helps = not base or all(any(self.left[k].get(w, 0) < n for w, n in base.items()) for k in (i, j))
        return helps and all(self.left[i].get(w, 0) + self.left[j].get(w, 0) <= n for w, n in base.items())

    def _goes_on(self, j: int) -> bool:
        """Whether a lever beside another may do with less: its mildest step does not suffice, nor do machines alone."""
        if j not in self.singles:
            return True
        lever = self.levers[j]
        mildest = next(step for step in lever.steps if self.changed(step) is not None)
        return self.singles[j].overrides != mildest and not lever.keys & MACHINES

    def _pair(self, first: Lever, second: Lever) -> Found | None:
        extreme = self.extreme(first)
        assert extreme is not None
        found = self.least(extreme, self._again(second, extreme))
        if found is None or self.fits(kept := found.overrides[len(extreme) :]):
            return None
        return self.least(kept, self._again(first, kept)) or found

    def _again(self, lever: Lever, beside: Overrides) -> Lever:
        """The lever as the job with other overrides has it: what a KV budget may shrink to depends on the prompts."""
        job = self.changed(beside)
        return next((other for other in levers(job) if other.keys == lever.keys), lever) if job else lever


def lessens(overrides: Overrides) -> int:
    """How changes touch the work of a step: 0 not at all, 1 fewer prompts, 2 less of each prompt."""
    work = [key for o in overrides if (key := key_of(o)).startswith("workload.")]
    return max((1 if key == "workload.prompts" else 2 for key in work), default=0)


def buys(overrides: Overrides) -> bool:
    """Whether changes need more machines, or larger ones."""
    return any(key_of(o) in MACHINES for o in overrides)


def bisect(count: int, holds: Callable[[int], bool]) -> int:
    """The least k with holds(k), taken to be monotone; holds(count - 1) is known."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


# ---- ranking and verification


def gpu_seconds_a_prompt(plan: Plan, job: Job) -> float:
    """GPU seconds of a step over its prompts: neither fewer prompts nor more machines make this smaller."""
    return job.gpus * plan.summary.times.step_s / job.workload.prompts


def as_remedy(base: Plan, job: Job, changed: Job, found: Found) -> Remedy:
    """A found change with its figures; `verified` is for the checker to say."""
    assert base.infeasible is not None
    window, resource = base.infeasible.window, base.infeasible.resource
    before, after = _held(base, job, window, resource), _held(found.plan, changed, window, resource)
    shrinks = sorted((o for o in before if after.get(o, 0) < before[o]), key=lambda o: after.get(o, 0) - before[o])
    return Remedy(
        change=" ".join(found.overrides),
        frees_bytes=sum(before.values()) - sum(after.values()),
        costs_s=round(found.plan.summary.times.step_s - base.summary.times.step_s, 3),
        costs_share=round(gpu_seconds_a_prompt(found.plan, changed) / gpu_seconds_a_prompt(base, job) - 1, 4),
        shrinks=tuple(shrinks),
    )


def _held(plan: Plan, job: Job, window: str, resource: Resource) -> dict[str, int]:
    """Bytes by object in a window; where a plan has no such window, in the one that holds most."""
    windows = plan.summary.windows
    fullest = max(windows, key=lambda w: w.hbm_bytes if resource == "hbm" else w.host_bytes)
    w = next((w for w in windows if w.name == window), fullest)
    if resource == "hbm":
        return w.by_object
    if resource == "node":
        return kept(job, plan.summary.node, plan.summary.objects, w.name)
    held = (o for o in plan.summary.objects if o.host_backed or o.residency[w.name] == "host")
    return {o.name: o.bytes for o in held}


def find(plan: Plan, job: Job, compiler: Compiler) -> Iterator[Remedy]:
    """Ranked remedies, each verified only when it is asked for."""
    search = Search(job, compiler)
    singles = list(search.singles.values())
    enough = sum(not (lessens(f.overrides) or buys(f.overrides)) for f in singles) >= ENOUGH
    every = [f for f in (singles if enough else [*singles, *search.pairs()]) if search.needs_all(f)]
    told = [(f, as_remedy(plan, job, change_job(job, f.overrides), f)) for f in every]
    better: list[frozenset[str]] = []
    for found, remedy in sorted(told, key=lambda t: _rank(*t)):
        keys = frozenset(key_of(o) for o in found.overrides)
        if any(keys < others for others in better):
            continue  # the same change with another beside it is milder, and has been told
        try:
            compiler.check(found.plan)
        except RollplexError:
            continue  # the sums fit and the steps do not: no remedy
        better.append(keys)
        yield remedy.model_copy(update={"verified": True})


def _rank(found: Found, remedy: Remedy) -> tuple[bool, float, bool, int, str]:
    """What keeps each prompt whole first; then the cost of a prompt; then what buys nothing; then fewer changes."""
    cuts, bought = lessens(found.overrides) == 2, buys(found.overrides)
    return (cuts, round(remedy.costs_share, 3), bought, len(found.overrides), remedy.change)


def with_remedies(plan: Plan, job: Job, compiler: Compiler) -> Plan:
    """The plan with the changes that make it fit, the cheapest for the work it does first."""
    assert plan.infeasible is not None
    remedies: dict[str, Remedy] = {}
    for remedy in find(plan, job, compiler):
        remedies.setdefault(remedy.change, remedy)
        if len(remedies) == KEEP:
            break
    return plan.model_copy(
        update={"infeasible": plan.infeasible.model_copy(update={"remedies": tuple(remedies.values())})}
    )
