"""The summary says of windows and objects what the replay of the programs shows: same objects, same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollplex.ir.check.capacity import Cuts
from rollplex.ir.check.facts import TIMELINE, Facts, moved, reads, streams, writes
from rollplex.ir.check.held import Span, Spans
from rollplex.ir.check.rules import Violation
from rollplex.ir.check.verdict import check_verdict, of_pools
from rollplex.ir.plan import PlannedObject
from rollplex.ir.steps import MapPart, UnmapPart


@dataclass(frozen=True)
class Places:
    """The windows in which each object can be in HBM, and those in which it is at the host only.

    `fullest` are bytes by window of objects whose pages come or go part by part.
    """

    hbm: dict[str, set[str]]
    host: dict[str, set[str]]
    fullest: dict[str, dict[str, int]]

    def held(self, o: PlannedObject, window: str) -> int:
        """Bytes of an object that is in HBM in a window: of what comes or goes in parts, at the fullest moment."""
        return self.fullest.get(window, {}).get(o.name, o.bytes)

    @classmethod
    def of(cls, cuts: Cuts, held: Sequence[Spans]) -> Places:
        """From the replays: a move belongs to the window it stands in, so the host has the windows around it."""
        hbm = cuts.windows_of([s for one in held for s in one.pages])
        host = cuts.windows_of([s for one in held for s in one.host])
        at_host = {name: found - hbm.get(name, set()) for name, found in host.items()}
        return cls(hbm, at_host, fullest(cuts, [s for one in held for s in one.pages]))


def fullest(cuts: Cuts, spans: Sequence[Span]) -> dict[str, dict[str, int]]:
    """What is in HBM of objects in parts in each window, in the first state in which that is most."""
    names = {at.step.object for at in cuts.facts.steps() if isinstance(at.step, MapPart | UnmapPart)}
    cut = [s for s in spans if s.object in names and s.process == TIMELINE]
    best: dict[str, dict[str, int]] = {}
    for state, window in enumerate(cuts.window if names else ()):
        here = dict.fromkeys(sorted(names), 0)
        for span in (s for s in cut if s.first <= state <= s.last):
            here[span.object] += span.nbytes
        if window not in best or sum(here.values()) > sum(best[window].values()):
            best[window] = here
    return best


def window_bytes(facts: Facts, places: Places) -> Iterator[Violation]:
    """`by_object` lists what is mapped in a window, with its bytes; `hbm_bytes` is their sum, of the fullest pool."""
    for w in facts.plan.summary.windows:
        live = {o.name: places.held(o, w.name) for o in facts.objects.values() if w.name in places.hbm.get(o.name, ())}
        for name in sorted({*live, *w.by_object}):
            if w.by_object.get(name, 0) != live.get(name, 0):
                what = f"says {w.by_object.get(name, 0):,} bytes of {name}, {live.get(name, 0):,} are mapped"
                yield Violation("window-bytes", what, object=name, nbytes=live.get(name, 0), where=w.name)
        most = max(of_pools(facts, w.by_object).values(), default=0)
        if w.hbm_bytes != most:
            what = f"hbm_bytes are {w.hbm_bytes:,}, by_object sums to {most:,} on a GPU"
            yield Violation("window-bytes", what, where=w.name)


def host_bytes(facts: Facts, places: Places) -> Iterator[Violation]:
    """`host_bytes` are those of frozen weights and of what is at the host in a window."""
    for w in facts.plan.summary.windows:
        there = {o.name: o.bytes for o in facts.objects.values() if _at_host(o, places, w.name)}
        total = max(of_pools(facts, there).values(), default=0)
        if w.host_bytes != total:
            what = f"host_bytes are {w.host_bytes:,}, the replay holds {total:,} ({', '.join(there) or 'nothing'})"
            yield Violation("host-bytes", what, nbytes=total, where=w.name)


def _at_host(o: PlannedObject, places: Places, window: str) -> bool:
    return o.host_backed or window in places.host.get(o.name, ())


def peak(facts: Facts) -> Iterator[Violation]:
    """Peaks are the largest windows."""
    summary = facts.plan.summary
    windows = {w.name: w for w in summary.windows}
    most = max((w.hbm_bytes for w in summary.windows), default=0)
    if summary.peak_hbm_bytes != most:
        yield Violation("peak", f"peak_hbm_bytes are {summary.peak_hbm_bytes:,}, the largest window has {most:,}")
    if summary.peak_window not in windows or windows[summary.peak_window].hbm_bytes != most:
        yield Violation("peak", f"peak_window is {summary.peak_window}, which does not hold the peak")
    host = max((w.host_bytes for w in summary.windows), default=0)
    if summary.peak_host_bytes != host:
        yield Violation("peak", f"peak_host_bytes are {summary.peak_host_bytes:,}, the largest window has {host:,}")


def pool_peaks(facts: Facts, places: Places) -> Iterator[Violation]:
    """Every pool of the processes is summed up, with the most that one of its GPUs holds."""
    by_window = {w.name: of_pools(facts, w.by_object) for w in facts.plan.summary.windows}
    at_host = {
        w: of_pools(facts, {o.name: o.bytes for o in facts.objects.values() if _at_host(o, places, w)})
        for w in facts.windows
    }
    for p in (p for p in facts.plan.summary.pools if p.name in facts.pools):
        most, host = (max((of[p.name] for of in found.values()), default=0) for found in (by_window, at_host))
        if p.peak_hbm_bytes != most or by_window.get(p.peak_window, {}).get(p.name) != most:
            told = f"a GPU of {p.name} has {p.peak_hbm_bytes:,} bytes in {p.peak_window}"
            yield Violation("peak", f"{told}, its fullest window {most:,}", nbytes=most, where=p.name)
        if p.peak_host_bytes != host:
            told = f"a GPU of {p.name} has {p.peak_host_bytes:,} bytes at the host"
            yield Violation("peak", f"{told}, the replay {host:,}", nbytes=host, where=p.name)


def residency_table(facts: Facts, places: Places) -> Iterator[Violation]:
    """The table places every object in every window as the programs do (paper table 3)."""
    for o in facts.objects.values():
        if set(o.residency) != set(facts.windows):
            yield Violation("residency-table", f"{o.name} has no place in every window", object=o.name, where=o.name)
            continue
        for window in facts.windows:
            real = _place(places, o, window)
            if real != _plain(o, window):
                what = f"{o.name} is planned {o.residency[window]}, the programs have it {real}"
                yield Violation("residency-table", what, object=o.name, where=window)


def starts(facts: Facts) -> Iterator[Violation]:
    """An object starts where the last window leaves it and the first finds it; at the host where these differ."""
    for o in (o for o in facts.objects.values() if o.start != "-" and facts.windows):
        first, last = (o.residency.get(w, o.start) for w in (facts.windows[0], facts.windows[-1]))
        right = first if first == last else "host"
        if o.start != right:
            what = f"{o.name} starts {o.start}, the windows around leave it {right}"
            yield Violation("residency-table", what, object=o.name, where=o.name)


def moves(facts: Facts) -> Iterator[Violation]:
    """What enters HBM or leaves it does so in a window in which the table has it there."""
    for at in facts.steps():
        name = moved(at.step)
        if name and facts.objects[name].residency.get(at.step.window) not in ("hbm", None):
            what = f"{name} is planned {facts.objects[name].residency[at.step.window]} in this window"
            yield Violation("residency-table", what, at, name)


def _place(places: Places, o: PlannedObject, window: str) -> str:
    if window in places.hbm.get(o.name, ()):
        return "hbm"
    return "host" if window in places.host.get(o.name, ()) else "-"


def _plain(o: PlannedObject, window: str) -> str:
    """What is dropped is nowhere, if it may be dropped at all."""
    place = o.residency[window]
    may_drop = o.recomputable or o.class_ == "regenerable"
    return "-" if place == "dropped" and may_drop else place


def uses_table(facts: Facts) -> Iterator[Violation]:
    """Steps use an object only in windows that the contract lists, and produce it first where it says."""
    produced: set[str] = set()
    for at in facts.steps():
        for name in dict.fromkeys([*reads(at.step), *writes(at.step), *streams(at.step)]):
            o = facts.objects[name]
            if at.step.window not in (o.produced, *o.consumed):
                yield Violation("uses-table", f"{name} is not planned to be used here", at, name)
            if name not in produced and o.produced not in ("start", at.step.window):
                yield Violation("uses-table", f"{name} is planned to be produced in {o.produced}", at, name)
            produced.add(name)
    for o in facts.objects.values():
        cyclic = o.start != "-"
        if cyclic != (o.produced == "start"):
            says = f"starts {'in ' + o.start if cyclic else 'nowhere'} and is produced in {o.produced}"
            yield Violation("uses-table", f"{o.name} {says}", object=o.name, where=o.name)
        if o.consumed and o.name not in produced and set(o.residency.values()) & {"hbm", "host"}:
            yield Violation("uses-table", f"{o.name} is planned and never used", object=o.name, where=o.name)


def check_summary(facts: Facts, places: Places) -> Iterator[Violation]:
    """Everything in which the summary and the programs differ."""
    yield from window_bytes(facts, places)
    yield from host_bytes(facts, places)
    yield from peak(facts)
    yield from pool_peaks(facts, places)
    yield from residency_table(facts, places)
    yield from starts(facts)
    yield from moves(facts)
    yield from uses_table(facts)
    yield from check_verdict(facts)
