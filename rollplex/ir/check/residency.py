"""Replay one program: where its objects are at every step, and what that forbids.

    object     pages     contents        host copy      map       -        -> pages, contents undefined
    ------------------------------------------------    fetch     copy     -> pages with contents, copy stays valid
    permanent  contents in one of the two, always       offload   pages    -> copy, pages gone
    boundary   pages from production to last use        unmap     pages and contents gone
                                                        drop      both gone
                                                        map_part, unmap_part    pages of some bytes
A write makes a host copy stale. Contents and copies are followed slot by slot. Sources: design.md sections 2 and 4,
paper section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from rollplex.ir.check.facts import Facts, offloaded, reads, streams, writes
from rollplex.ir.check.held import LASTING, NOTHING, Held, Parts, Spans
from rollplex.ir.check.release import Layers, layers, needed, remade
from rollplex.ir.check.rules import At, Violation
from rollplex.ir.plan import PlannedObject
from rollplex.ir.steps import Drop, Fetch, Map, MapPart, Offload, Run, Unmap, UnmapPart, UpdateChunk, describe, named

SAVES = ("prefix",)
"""Tasks that stream phase-local state out to the host; all others stream it in."""


@dataclass
class Replay:
    """One program's objects, step by step; `spans` is what they held, `violations` what was wrong."""

    facts: Facts
    process: str
    spans: Spans
    violations: list[Violation] = field(default_factory=list)
    _held: dict[str, Held] = field(default_factory=dict)
    _last_use: dict[str, int] = field(default_factory=dict)
    _last_chunk: dict[str, int] = field(default_factory=dict)

    def run(self) -> Replay:
        """Replay the whole program."""
        self._begin()
        for at in self.facts.steps(self.process):
            self._step(at)
            self._forget_after_last_use(at)
        self._end()
        return self

    @cached_property
    def _layers(self) -> Layers:
        return layers(self.facts)

    # ---- the ends of an iteration

    def _begin(self) -> None:
        for at in self.facts.steps(self.process):
            self._last_use |= dict.fromkeys(named(at.step), at.index)
            if isinstance(at.step, UpdateChunk):
                self._last_chunk[at.step.role] = at.index
        for o in self.facts.objects.values():
            if o.process == self.process:
                self._held[o.name] = Held.at_start(o, self.spans)
                self._check_start(o)

    def _check_start(self, o: PlannedObject) -> None:
        if o.host_backed and o.class_ != "regenerable":
            self._refuse("start-state", f"{o.name} is {o.class_}: no host copy of it is always valid", None, o)
        if o.class_ == "permanent" and o.start not in ("hbm", "host"):
            self._refuse("start-state", f"{o.name} is permanent and starts {_where(o.start)}", None, o)
        if o.start == "host" and o.class_ not in LASTING:
            self._refuse("start-state", f"{o.name} is {o.class_} and starts at the host", None, o)

    def _end(self) -> None:
        states = len(self.facts.programs[self.process])
        for held in self._held.values():
            self._check_end(held)
            held.detach(states)
            held.free_host(states)

    def _check_end(self, held: Held) -> None:
        o, place = held.o, held.place
        kept = place == o.start or (o.start in ("-", "dropped") and not held.mapped)
        if not kept:
            self._refuse("end-state", f"{o.name} starts {_where(o.start)} and ends {_where(place)}", None, o)
        elif o.start == "hbm" and o.class_ in LASTING and held.contents != held.whole:
            self._refuse("end-state", f"{o.name} starts with contents and ends without", None, o)

    # ---- moves

    def _step(self, at: At) -> None:
        match at.step:
            case Map(imported=True) | Unmap(imported=True):
                return
            case Map(object=name):
                self._attach(at, self._held[name], NOTHING)
            case MapPart(object=name, start=start, stop=stop):
                self._attach_part(at, self._held[name], start, stop)
            case UnmapPart(object=name, start=start, stop=stop):
                self._unmap_part(at, self._held[name], start, stop)
            case Fetch(object=name):
                self._fetch(at, self._held[name])
            case Offload(object=name):
                self._offload(at, self._held[name])
            case Unmap(object=name):
                self._unmap(at, self._held[name])
            case Drop(object=name):
                self._drop(at, self._held[name])
            case _:
                self._use(at)

    def _attach(self, at: At, held: Held, contents: Parts) -> None:
        if held.mapped:
            self._refuse("double-map", f"{held.o.name} is mapped already", at, held.o)
        else:
            held.attach(at.index + 1, contents)

    def _attach_part(self, at: At, held: Held, start: int, stop: int) -> None:
        if held.meets(start, stop):
            what = f"bytes {start:,} to {stop:,} of {held.o.name} have pages already"
            self._refuse("double-map", what, at, held.o)
        else:
            held.attach_part(at.index + 1, start, stop)

    def _unmap_part(self, at: At, held: Held, start: int, stop: int) -> None:
        self._keep_boundary(at, held)
        self._keep_lasting(at, held)
        if not held.covers(start, stop):
            what = f"bytes {start:,} to {stop:,} of {held.o.name} are not mapped{held.gone}"
            self._refuse("not-held", what, at, held.o)
        held.detach_part(at.index, start, stop, f" (step {at.index}, {describe(at.step)}, released it)")

    def _fetch(self, at: At, held: Held) -> None:
        if held.host != held.whole:
            self._refuse("no-host-copy", f"{held.o.name} has no valid host copy{held.gone}", at, held.o)
        self._attach(at, held, held.whole)

    def _offload(self, at: At, held: Held) -> None:
        self._keep_boundary(at, held)
        if not held.complete:
            self._refuse("not-held", f"{held.o.name} is not mapped{held.gone}", at, held.o)
        elif held.contents != held.whole:
            self._refuse("offload-undefined", f"{held.o.name} has not been produced", at, held.o)
        held.fill_host(at.index + 1, held.whole)
        self._detach(at, held)

    def _unmap(self, at: At, held: Held) -> None:
        self._keep_boundary(at, held)
        if not held.mapped:
            self._refuse("not-held", f"{held.o.name} is not mapped{held.gone}", at, held.o)
        self._keep_lasting(at, held)
        self._detach(at, held)

    def _drop(self, at: At, held: Held) -> None:
        self._keep_boundary(at, held)
        if held.o.class_ == "permanent":
            self._refuse("permanent-lost", f"{held.o.name} is permanent", at, held.o)
            return
        if not held.mapped and not held.host:
            self._refuse("not-held", f"{held.o.name} is nowhere{held.gone}", at, held.o)
        self._keep_lasting(at, held)
        self._detach(at, held)
        held.dropped = True
        if not held.o.host_backed:
            held.stale(at.index, held.whole)

    def _detach(self, at: At, held: Held) -> None:
        held.detach(at.index, f" (step {at.index}, {describe(at.step)}, released it)")

    def _keep_boundary(self, at: At, held: Held) -> None:
        """Boundary state stays in HBM from its production to its last use (paper section 3.2)."""
        if held.o.class_ == "boundary" and held.contents and (later := self._later_use(at, held.o.name)):
            self._refuse("boundary-moved", f"{held.o.name} is still to be used by {later}", at, held.o)

    def _keep_lasting(self, at: At, held: Held) -> None:
        """Contents without another copy go only if chunks make them again from FP32 masters (paper section 3.2)."""
        if held.host == held.whole:
            return
        if held.o.class_ == "permanent":
            self._refuse("permanent-lost", f"{held.o.name} is permanent and has no valid host copy", at, held.o)
        elif held.o.class_ == "regenerable" and held.contents and not remade(self.facts, held.o):
            self._refuse("released", f"{held.o.name} has no other copy, and no chunk writes it again", at, held.o)

    def _later_use(self, at: At, name: str) -> At | None:
        steps = self.facts.programs[self.process]
        later = (At(self.process, i, steps[i]) for i in range(at.index + 1, len(steps)))
        return next((b for b in later if name in (*reads(b.step), *streams(b.step))), None)

    # ---- uses

    def _use(self, at: At) -> None:
        for name in reads(at.step):
            if name in self._held:
                self._read(at, self._held[name])
        for name in streams(at.step):
            self._stream(at, self._held[name])
        if isinstance(at.step, UpdateChunk):
            self._update_in_place(at, at.step)
        for name in writes(at.step):
            self._write(at, self._held[name])
        for name in offloaded(at.step):
            self._leave_in_pieces(at, self._held[name])

    def _leave_in_pieces(self, at: At, held: Held) -> None:
        """While the step runs, its pages and its place in the pinned pool are both in use."""
        if held.complete:
            held.fill_host(at.index, held.whole)
            self._detach(at, held)
        else:
            self._refuse("not-held", f"{held.o.name} is not mapped{held.gone}", at, held.o)

    def _read(self, at: At, held: Held) -> None:
        parts = self._parts(at, held)
        if self._is_mapped(at, held, "reads") and not parts <= held.contents:
            kind, missing = ("dropped-needed" if held.dropped else "not-produced"), sorted(parts - held.contents)
            what = f"it reads {_slot(held, missing[0])}, whose pages hold nothing yet"
            self._refuse(kind, what, at, held.o)
            held.fill(at.index, parts)

    def _is_mapped(self, at: At, held: Held, verb: str) -> bool:
        start, stop = needed(self.facts, self._layers, at.step, held.o)
        if held.covers(start, stop) and held.mapped:
            return True
        if held.mapped:
            what = f"it {verb} {held.o.name} up to byte {stop:,}, of which not all from {start:,} on have pages"
            self._refuse("not-mapped", what, at, held.o)
            return False
        kind = "dropped-needed" if held.dropped else "not-mapped"
        self._refuse(kind, f"it {verb} {held.o.name}, which is not mapped{held.gone}", at, held.o)
        # Go on as if it were there: one missing step is one violation.
        held.dropped = False
        held.attach(at.index, held.whole)
        return False

    def _write(self, at: At, held: Held) -> None:
        self._is_mapped(at, held, "writes")
        if held.o.host_backed:
            self._refuse("frozen-written", f"it writes {held.o.name}, whose host copy must stay valid", at, held.o)
        elif isinstance(at.step, Run) and held.o.class_ in LASTING:
            self._refuse("write-outside-update", f"it writes {held.o.name}, which is {held.o.class_}", at, held.o)
        parts = self._parts(at, held)
        if self._completes(at, held):
            held.fill(at.index + 1, parts)
            held.dropped = False
        held.stale(at.index, parts)

    def _completes(self, at: At, held: Held) -> bool:
        """A snapshot is there when its last chunk is written."""
        step = at.step
        if not isinstance(step, UpdateChunk) or held.o.class_ != "regenerable":
            return True
        return self._last_chunk[step.role] == at.index

    def _update_in_place(self, at: At, step: UpdateChunk) -> None:
        """Adam changes master weights and moments where they are: a host copy from before is stale (section 3.2)."""
        for held in (self._held[n] for n in step.reads if n in self._held):
            if held.o.class_ == "permanent":
                if held.o.name not in step.writes:
                    what = f"it changes {held.o.name}, which is not among its writes"
                    self._refuse("chunk-state", what, at, held.o)
                held.stale(at.index, held.whole)

    def _stream(self, at: At, held: Held) -> None:
        parts = self._parts(at, held)
        if isinstance(at.step, Run) and at.step.task in SAVES and held.o.class_ == "phase-local":
            held.fill_host(at.index + 1, parts)
        elif not parts <= held.host and not (held.mapped and parts <= held.contents):
            what = (
                f"it streams {_slot(held, min(parts, default=0))}, which is neither at the host nor in HBM{held.gone}"
            )
            self._refuse("no-host-copy", what, at, held.o)
            held.fill_host(at.index, held.whole)

    def _parts(self, at: At, held: Held) -> Parts:
        """The slots that a step touches, those that there are (work.py refuses the others)."""
        return self.facts.parts(at.step, held.o) & held.whole

    def _forget_after_last_use(self, at: At) -> None:
        """State that does not outlive an iteration gives its place in the pinned pool back after its last use."""
        for held in (self._held[n] for n in named(at.step) if n in self._held):
            if held.o.class_ not in LASTING and at.index >= self._last_use[held.o.name]:
                held.free_host(at.index)

    def _refuse(self, kind: str, what: str, at: At | None, o: PlannedObject) -> None:
        self.violations.append(Violation(kind, what, at, o.name, o.bytes, where=f"{self.process}, {o.name}"))


def _slot(held: Held, slot: int) -> str:
    return f"{held.o.name} (slot {slot})" if held.o.slots > 1 else held.o.name


def _where(place: str) -> str:
    return {"hbm": "in HBM", "host": "at the host", "-": "nowhere"}.get(place, place)


def replay(facts: Facts) -> dict[str, Replay]:
    """Every program that owns objects, replayed."""
    owning = dict.fromkeys(o.process for o in facts.objects.values())
    return {process: Replay(facts, process, Spans(process)).run() for process in owning}


def check_residency(replays: dict[str, Replay]) -> Iterator[Violation]:
    """What the replays found."""
    for one in replays.values():
        yield from one.violations
