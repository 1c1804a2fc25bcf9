"""What would make an infeasible job fit: the smallest change of each key, then pairs, each compiled again and checked.

    roles.actor.rollout.kv_cache_gib=37.5      frees 6.5 GiB   step +0 s
    workload.prompts=40                        frees 3.6 GiB   step -37.6 s, a prompt 0.6 % dearer

Data        J        the job that is over           L     its levers, each with steps v[1], v[2], .. ever more drastic
            fits(J)  whether J compiles within its capacities       lack(J)   the relaxation of relax.py, no solver
            gain(l)  bytes by which the most drastic step of l lessens lack(J)
Single      for l in L: the least i with lack(J + v[i]) = {} by bisection, from there the least with fits(J + v[i])
Pairs       for l, l' in L with gain(l), 0 < gain(l) + gain(l') >= lack(J), where l does not suffice: l at its most
            drastic, the least v'[i] that fits beside it, then the least v[i] that fits beside that
Rank        what keeps the prompts whole before what cuts them; then GPU seconds a prompt; then the fewest changes.
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
from rollplex.passes.levers import Lever, Overrides, key_of, levers
from rollplex.passes.node_memory import kept
from rollplex.passes.relax import lack

KEEP = 6
ENOUGH = 3
"""With so many single changes that keep the work as it is, pairs are not looked for."""
MOST_PLANS = 100
"""Jobs compiled in full for one infeasible job, at most; a count and no clock, so that plans repeat."""


class Compiler(Protocol):
    """The pipeline, as far as remedies need it. Any of these raises RollplexError for a job that it refuses."""

    def lifetimes(self, job: Job, like: Module | None = None) -> Module:
        """The module as far as its state contract, with the layout of `like` where that serves; nothing is placed."""
        ...

    def plan(self, job: Job) -> Plan:
        """The whole plan."""
        ...

    def check(self, plan: Plan) -> None:
        """Put a plan through the checker."""
        ...


@dataclass(frozen=True)
class Found:
    """Overrides that make the job fit, and the plan they give."""

    overrides: Overrides
    plan: Plan


@dataclass
class Search:
    """One infeasible job; what was tried is remembered, because pairs come back to the same jobs."""

    job: Job
    compiler: Compiler
    _lacks: dict[Overrides, dict[str, int] | None] = field(default_factory=dict)
    _plans: dict[Overrides, Plan | None] = field(default_factory=dict)

    @cached_property
    def base(self) -> Module:
        """The job itself as far as its state contract."""
        return self.compiler.lifetimes(self.job)

    def changed(self, overrides: Overrides) -> Job | None:
        """The job with overrides; None where the job refuses them."""
        try:
            return change_job(self.job, overrides)
        except JobError:
            return None

    def lack(self, overrides: Overrides) -> dict[str, int] | None:
        """The relaxation's lack; None where no legal job or no state contract comes out."""
        if overrides not in self._lacks:
            self._lacks[overrides] = self._lack(overrides)
        return self._lacks[overrides]

    def _lack(self, overrides: Overrides) -> dict[str, int] | None:
        job = self.changed(overrides)
        try:
            return None if job is None else lack(self.compiler.lifetimes(job, self.base))
        except RollplexError:
            return None  # a change under which the algorithm cannot be compiled is no remedy

    def fits(self, overrides: Overrides) -> Plan | None:
        """The plan, if the changed job fits; the relaxation spares the solver what cannot."""
        if self.lack(overrides) != {}:
            return None
        if overrides not in self._plans:
            job = self.changed(overrides)
            assert job is not None
            self._plans[overrides] = self._plan(job) if len(self._plans) < MOST_PLANS else None
        return self._plans[overrides]

    def _plan(self, job: Job) -> Plan | None:
        try:
            plan = self.compiler.plan(job)
        except RollplexError:
            return None  # out of time, or refused by a pass: not shown to fit
        return plan if plan.feasible else None

    def least(self, before: Overrides, lever: Lever) -> Found | None:
        """The mildest value of a lever that fits beside other overrides."""
        steps = [(*before, *overrides) for overrides in lever.steps]
        legal = [v for v in steps if self.changed(v) is not None]
        if not legal:
            return None
        if len(legal) <= 2:  # so few need not be ever more drastic: schedules are not
            return next((f for v in legal if (f := self.found(v))), None)
        if self.lack(legal[-1]) != {}:
            return None
        first = bisect(len(legal), lambda k: self.lack(legal[k]) == {}, 0)
        if (found := self.found(legal[first])) or not self.fits(legal[-1]):
            return found
        return self.found(legal[bisect(len(legal), lambda k: self.fits(legal[k]) is not None, first + 1)])

    def found(self, overrides: Overrides) -> Found | None:
        """The overrides with their plan, if they fit."""
        plan = self.fits(overrides)
        return Found(overrides, plan) if plan else None

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

    def _total(self, overrides: Overrides) -> int | None:
        found = self.lack(overrides)
        return None if found is None else sum(found.values())

    @cached_property
    def gains(self) -> dict[int, int]:
        """gain(l) by position in L, of levers with a legal step."""
        base, extremes = self._total(()) or 0, {i: self.extreme(lever) for i, lever in enumerate(self.levers)}
        left = {i: self._total(e) for i, e in extremes.items() if e is not None}
        return {i: base - total for i, total in left.items() if total is not None}

    def pairs(self) -> Iterator[Found]:
        """Two decisions that suffice together and not alone, those that keep the work before those that lessen it."""
        base, seen = self._total(()) or 0, set[frozenset[str]]()
        together = [
            (i, j) for i in self.gains for j in self.gains if i not in self.singles and self._promises(i, j, base)
        ]
        for i, j in sorted(together, key=lambda t: max(lessens(self.levers[k].steps[0]) for k in t)):
            keys = self.levers[i].keys | self.levers[j].keys
            if keys not in seen and len(seen) < KEEP and (found := self._pair(self.levers[i], self.levers[j])):
                seen.add(keys)
                yield found

    def _promises(self, i: int, j: int, base: int) -> bool:
        """Whether a pair can be enough; machines that suffice alone are no company."""
        first, second = self.levers[i], self.levers[j]
        machine = j in self.singles and any(key.startswith("cluster.") for key in second.keys)
        helps = self.gains[i] > 0 or not base
        return helps and not machine and not first.keys & second.keys and self.gains[i] + self.gains[j] >= base

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


def bisect(count: int, holds: Callable[[int], bool], low: int) -> int:
    """The least k >= low with holds(k), taken to be monotone; holds(count - 1) is known."""
    high = count - 1
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
    enough = sum(not lessens(f.overrides) for f in singles) >= ENOUGH
    every = [f for f in (singles if enough else [*singles, *search.pairs()]) if search.needs_all(f)]
    told = [(f, as_remedy(plan, job, change_job(job, f.overrides), f)) for f in every]
    for found, remedy in sorted(told, key=lambda t: _rank(*t)):
        try:
            compiler.check(found.plan)
        except RollplexError:
            continue  # the sums fit and the steps do not: no remedy
        yield remedy.model_copy(update={"verified": True})


def _rank(found: Found, remedy: Remedy) -> tuple[int, float, int, str]:
    """What keeps each prompt whole first; then the cost of a prompt; then the fewest changes."""
    cuts = lessens(found.overrides) == 2
    return (cuts, round(remedy.costs_share, 3), len(found.overrides), remedy.change)


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
