"""Happens-before: the programs executed symbolically, with a clock for every step (design.md section 4).

    need["train"][i]["rollout"]      steps of rollout that are done whenever the first i steps of train are

A signal is before its waits, what stands before a barrier (or an exchange that several programs enter) is before what
stands behind it in any of them. A program that can go no further is a deadlock, reported with what it waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from rollplex.ir.check.facts import Facts
from rollplex.ir.check.rules import At, Violation
from rollplex.ir.steps import Barrier, Exchange, Signal, Step, Wait

Clock = dict[str, int]
Meeting = tuple[str, str, str, int]


@dataclass(frozen=True)
class Order:
    """The partial order of all steps; `sequence` is one execution that respects it."""

    need: dict[str, list[Clock]]
    sequence: list[At]

    def before(self, first: At, second: At) -> bool:
        """Whether the first step has ended before the second begins, in every execution."""
        if first.process == second.process:
            return first.index < second.index
        return self.need[second.process][second.index][first.process] > first.index

    def ordered(self, a: At, b: At) -> bool:
        """Whether one of two steps is before the other."""
        return self.before(a, b) or self.before(b, a)


@dataclass
class _Execution:
    """Where every program stands; the only mutable state of this file."""

    facts: Facts
    clock: dict[str, Clock]
    need: dict[str, list[Clock]]
    posted: dict[str, Clock] = field(default_factory=dict)
    sequence: list[At] = field(default_factory=list)
    met: dict[str, int] = field(default_factory=dict)

    def at(self, process: str) -> At | None:
        """The step that a process is at; None at the end."""
        index, steps = self.clock[process][process], self.facts.programs[process]
        return At(process, index, steps[index]) if index < len(steps) else None

    def advance(self, at: At, seen: Clock) -> None:
        """One step is done; `seen` are the steps of others that are done before it is."""
        mine = {p: max(n, seen.get(p, 0)) for p, n in self.clock[at.process].items()}
        mine[at.process] = at.index + 1
        self.clock[at.process] = mine
        self.need[at.process].append(mine)
        self.sequence.append(at)


def execute(facts: Facts) -> tuple[Order, tuple[Violation, ...]]:
    """Run all programs until they end or none can go on."""
    names = list(facts.programs)
    zero = {p: dict.fromkeys(names, 0) for p in names}
    run = _Execution(facts, zero, {p: [zero[p]] for p in names})
    groups = _members(facts)
    while sum(_go(run, process, groups) for process in names):
        pass
    stuck = [at for p in names if (at := run.at(p))]
    found = (*_events(facts), *_collectives(facts, groups), *_deadlock(facts, stuck))
    return Order(run.need, run.sequence), found


def _members(facts: Facts) -> dict[str, tuple[str, ...]]:
    """Which programs enter an exchange of each group; those of one program are among its own ranks."""
    groups: dict[str, dict[str, None]] = {}
    for at in facts.steps():
        if isinstance(at.step, Exchange):
            groups.setdefault(at.step.group, {})[at.process] = None
    return {group: tuple(who) for group, who in groups.items()}


def _go(run: _Execution, process: str, groups: dict[str, tuple[str, ...]]) -> bool:
    """Run one program until it blocks; whether anything happened."""
    began = len(run.sequence)
    while (at := run.at(process)) and _step(run, at, groups):
        pass
    return len(run.sequence) > began


def _step(run: _Execution, at: At, groups: dict[str, tuple[str, ...]]) -> bool:
    match at.step:
        case Wait(event=event):
            if event not in run.posted:
                return False
            run.advance(at, run.posted[event])
        case Barrier():
            return _meet(run, at, tuple(run.facts.programs))
        case Exchange(group=group) if len(groups[group]) > 1:
            return _meet(run, at, groups[group])
        case Signal(event=event):
            run.advance(at, {})
            run.posted.setdefault(event, run.clock[at.process])
        case _:
            run.advance(at, {})
    return True


def _meet(run: _Execution, at: At, members: Sequence[str]) -> bool:
    """All members stand at the same collective, or nobody goes on."""
    others = [run.at(p) for p in members]
    if any(o is None or _collective(o.step) != _collective(at.step) for o in others):
        return False
    seen = {p: max(run.clock[m][p] for m in members) for p in run.clock}
    for other in others:
        assert other is not None
        run.advance(other, seen)
    return True


def _collective(step: Step) -> tuple[str, ...]:
    match step:
        case Barrier(name=name):
            return ("barrier", name)
        case Exchange(group=group, op=op, nbytes=nbytes):
            return (group, op, str(nbytes))
        case _:
            return ()


def _collectives(facts: Facts, groups: dict[str, tuple[str, ...]]) -> Iterator[Violation]:
    """Programs that share barriers and groups enter them in one order."""
    shared = {g for g, who in groups.items() if len(who) > 1}
    entered = {
        p: [_collective(s) for s in steps if isinstance(s, Barrier) or (isinstance(s, Exchange) and s.group in shared)]
        for p, steps in facts.programs.items()
    }
    for first, second in combinations(entered, 2):
        common = {c[0] for c in entered[first]} & {c[0] for c in entered[second]}
        mine, theirs = ([c for c in entered[p] if c[0] in common] for p in (second, first))
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                what = f"enters {' '.join(a)} where {first} enters {' '.join(b)}"
                yield Violation("collective-order", what, where=second)
                break


def _events(facts: Facts) -> Iterator[Violation]:
    """Every event has one signal; every waiter waits once; somebody waits."""
    signals: dict[str, list[At]] = {}
    waits: dict[str, list[At]] = {}
    for at in facts.steps():
        if isinstance(at.step, Signal):
            signals.setdefault(at.step.event, []).append(at)
        elif isinstance(at.step, Wait):
            waits.setdefault(at.step.event, []).append(at)
    for event, found in signals.items():
        for again in found[1:]:
            yield Violation("event", f"{event} was signalled before, by {found[0]}", again)
        if event not in waits:
            yield Violation("unheard-signal", "nobody waits for it", found[0])
    for event, found in waits.items():
        if event not in signals:
            yield Violation("event", f"nobody signals {event}", found[0])
        for i, at in enumerate(found):
            if any(at.process == earlier.process for earlier in found[:i]):
                yield Violation("event", f"{at.process} has waited for {event} before", at)


def _deadlock(facts: Facts, stuck: list[At]) -> Iterator[Violation]:
    """Each program that cannot go on, and what the others do meanwhile."""
    for at in stuck:
        others = "; ".join(str(o) for o in stuck if o is not at) or "the others have ended"
        yield Violation("deadlock", f"it never ends: {_lacks(facts, at)}. Meanwhile {others}", at)


def _lacks(facts: Facts, at: At) -> str:
    if not isinstance(at.step, Wait):
        return "not every process arrives there"
    event = at.step.event
    signals = (s for s in facts.steps() if isinstance(s.step, Signal) and s.step.event == event)
    signal = next(signals, None)
    return f"{event} is signalled by {signal}" if signal else f"nobody signals {event}"
