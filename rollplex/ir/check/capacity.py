"""Capacity: the most bytes in any state that the processes of one GPU can reach together, pool by pool.

A state is a cut: i steps of train are done and j of rollout. It can be reached when each program's done steps need no
undone step of the other, so for each i the possible j are an interval, and its ends only grow with i:

    rollout  j   5 |             # # #         # reachable
                 4 |           # # # .         . not: train may pass its barrier only after rollout has arrived
                 3 |   # # # # # . . .
                 0 +-------------------- i  train
Bytes count once, at the owner. A fetch holds its pages from its beginning, an offload until its end: both are states.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rollplex.ir.check.facts import TIMELINE, Facts
from rollplex.ir.check.held import Span, Spans
from rollplex.ir.check.order import Order
from rollplex.ir.check.rules import Violation, amount

Cut = dict[str, int]


@dataclass(frozen=True)
class Peak:
    """The most bytes of one window, and the state in which they are held."""

    nbytes: int
    cut: Cut


@dataclass(frozen=True)
class Cuts:
    """The reachable states, seen from the program that says which window it is."""

    facts: Facts
    order: Order

    @cached_property
    def window(self) -> list[str]:
        """The window of every state but the last: that of the next step of the timeline's program."""
        return [s.window for s in self.facts.programs[TIMELINE]]

    @cached_property
    def _needs(self) -> dict[tuple[str, str], list[int]]:
        """How many steps of `other` the first j steps of `process` need, for every j; it never falls with j."""
        programs = self.facts.programs
        return {(p, o): [c[o] for c in self.order.need[p]] for p in programs for o in programs}

    def interval(self, process: str, other: str, state: int) -> range:
        """States of `other` that can be when `process` is in `state`."""
        low = self._needs[process, other][state]
        return range(low, bisect_right(self._needs[other, process], state))

    def windows_of(self, spans: Sequence[Span]) -> dict[str, set[str]]:
        """The windows in which each object's spans can be."""
        found: dict[str, set[str]] = {}
        for span in spans:
            found.setdefault(span.object, set()).update(self._windows(span))
        return found

    def _windows(self, span: Span) -> set[str]:
        if span.process == TIMELINE:
            return set(self.window[span.first : span.last + 1])
        states = range(len(self.window))
        meets = (self._meets(self.interval(TIMELINE, span.process, i), span) for i in states)
        return {w for w, meet in zip(self.window, meets, strict=True) if meet}

    @staticmethod
    def _meets(states: range, span: Span) -> bool:
        return max(states.start, span.first) <= min(states.stop - 1, span.last)


@dataclass(frozen=True)
class Load:
    """Bytes that one program holds in every state of its own."""

    process: str
    nbytes: list[int]
    _heaviest: dict[tuple[int, int], int] = field(default_factory=dict)

    def heaviest(self, low: int, stop: int) -> int:
        """The state with the most bytes among low .. stop-1; programs wait for each other, so few pairs are asked."""
        if (low, stop) not in self._heaviest:
            self._heaviest[low, stop] = max(range(low, stop), key=self.nbytes.__getitem__)
        return self._heaviest[low, stop]


def loads(facts: Facts, spans: Sequence[Span]) -> list[Load]:
    """Bytes of these spans by program, the timeline's first; programs without any are left out."""
    found = []
    for process in sorted({TIMELINE, *(s.process for s in spans)}, key=lambda p: (p != TIMELINE, p)):
        change = [0] * (len(facts.programs[process]) + 2)
        for span in (s for s in spans if s.process == process):
            change[span.first] += span.nbytes
            change[span.last + 1] -= span.nbytes
        total, held = 0, []
        for step in change[:-1]:
            total += step
            held.append(total)
        found.append(Load(process, held))
    return found


def peaks(cuts: Cuts, found: list[Load]) -> dict[str, Peak]:
    """The peak of every window, over all reachable states."""
    best: dict[str, Peak] = {}
    first, *others = found
    for state, window in enumerate(cuts.window):
        cut = _grow(cuts, {first.process: state}, others)
        total = sum(load.nbytes[cut[load.process]] for load in found)
        if window not in best or total > best[window].nbytes:
            best[window] = Peak(total, cut)
    return best


def _grow(cuts: Cuts, cut: Cut, rest: list[Load]) -> Cut:
    """The heaviest reachable cut that extends this one."""
    if not rest:
        return cut
    first, *others = rest
    ranges = [cuts.interval(p, first.process, s) for p, s in cut.items()]
    low, stop = max(r.start for r in ranges), min(r.stop for r in ranges)
    if not others:
        return {**cut, first.process: first.heaviest(low, stop)}
    options = [_grow(cuts, {**cut, first.process: s}, others) for s in range(low, stop)]
    return max(options, key=lambda c: sum(load.nbytes[c[load.process]] for load in rest))


def check_capacity(facts: Facts, cuts: Cuts, held: Sequence[Spans]) -> Iterator[Violation]:
    """Nothing over HBM or the pinned pool in any reachable state of a feasible plan (design.md section 4)."""
    for processes in facts.pools.values():
        yield from _of_pool(facts, cuts, [one for one in held if one.process in processes])


def _of_pool(facts: Facts, cuts: Cuts, held: Sequence[Spans]) -> Iterator[Violation]:
    summary = facts.plan.summary
    for kind, capacity, device, spans in (
        ("capacity", summary.capacity_bytes, "the GPU", [s for one in held for s in one.pages]),
        ("host-capacity", summary.host_capacity_bytes, "the pinned pool", [s for one in held for s in one.host]),
    ):
        for window, peak in peaks(cuts, loads(facts, spans)).items():
            if peak.nbytes > capacity:
                more = peak.nbytes - capacity
                what = f"{device} has {amount(capacity)}, {amount(peak.nbytes)} are live, {amount(more)} too many"
                live, where = _live(spans, peak.cut), f"{window} ({_state(peak.cut)})"
                yield Violation(kind, f"{what} ({live})", nbytes=more, where=where)


def _live(spans: list[Span], cut: Cut) -> str:
    held = dict[str, int]()
    for s in (s for s in spans if s.first <= cut.get(s.process, -1) <= s.last):
        held[s.object] = held.get(s.object, 0) + s.nbytes
    largest = sorted(held.items(), key=lambda item: (-item[1], item[0]))[:4]
    return ", ".join([*(f"{name} {amount(n)}" for name, n in largest), *([".."] if len(held) > 4 else [])])


def _state(cut: Cut) -> str:
    return ", ".join(f"{process} before step {state}" for process, state in cut.items())
