"""Replay one program: where its objects are at every step, and what that forbids.

    object     pages     contents        host copy      map       -        -> pages, contents undefined
    ------------------------------------------------    fetch     copy     -> pages with contents, copy stays valid
    permanent  contents in one of the two, always       offload   pages    -> copy, pages gone
    boundary   pages from production to last use        unmap     pages and contents gone
                                                        drop      both gone
A write makes a host copy stale. Contents and copies are followed slot by slot. Sources: design.md sections 2 and 4,
paper section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollplex.ir.check.facts import Facts, names, reads, streams, writes
from rollplex.ir.check.rules import At, Violation
from rollplex.ir.plan import PlannedObject
from rollplex.ir.steps import Drop, Fetch, Map, Offload, Run, Unmap, UpdateChunk, describe

SAVES = ("prefix",)
"""Tasks that stream phase-local state out to the host; all others stream it in."""
LASTING = ("permanent", "regenerable")
"""State that outlives an iteration."""


@dataclass(frozen=True)
class Span:
    """An object that holds bytes in states first .. last of its owner: state i is when i steps are done."""

    object: str
    process: str
    first: int
    last: int


@dataclass
class _Object:
    """What is known of one object at one step; `since` and `host_since` are the states in which its bytes came."""

    o: PlannedObject
    contents: frozenset[int]
    host: frozenset[int]
    last_use: int
    since: int | None = None
    host_since: int | None = None
    gone: str = ""
    dropped: bool = False

    @property
    def whole(self) -> frozenset[int]:
        return frozenset(range(self.o.slots))

    @property
    def mapped(self) -> bool:
        return self.since is not None


@dataclass
class Replay:
    """One program's objects, step by step: spans of HBM and of the pinned pool, and what was wrong."""

    facts: Facts
    process: str
    spans: list[Span] = field(default_factory=list)
    host_spans: list[Span] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    _objects: dict[str, _Object] = field(default_factory=dict)
    _last_chunk: dict[str, int] = field(default_factory=dict)

    def run(self) -> Replay:
        """Replay the whole program."""
        self._begin()
        for at in self.facts.steps(self.process):
            self._step(at)
        self._end()
        return self

    # ---- the ends of an iteration

    def _begin(self) -> None:
        last: dict[str, int] = {}
        for at in self.facts.steps(self.process):
            last |= dict.fromkeys(names(at.step), at.index)
            if isinstance(at.step, UpdateChunk):
                self._last_chunk[at.step.role] = at.index
        for o in self.facts.objects.values():
            if o.process == self.process:
                self._objects[o.name] = self._start(o, last.get(o.name, -1))

    def _start(self, o: PlannedObject, last_use: int) -> _Object:
        """Phase-local state and boundaries end with an iteration, even where their pages stay."""
        whole, nothing = frozenset(range(o.slots)), frozenset[int]()
        lasting = o.class_ in LASTING
        held = _Object(o, whole if lasting and o.start == "hbm" else nothing, nothing, last_use)
        held.since = 0 if o.start == "hbm" else None
        if o.host_backed or (o.start == "host" and lasting):
            held.host, held.host_since = whole, 0
        if o.class_ == "permanent" and o.start not in ("hbm", "host"):
            self._refuse("start-state", f"{o.name} is permanent and starts {o.start}", None, o)
        if o.start == "host" and not lasting:
            self._refuse("start-state", f"{o.name} is {o.class_} and starts at the host", None, o)
        return held

    def _end(self) -> None:
        states = len(self.facts.programs[self.process])
        for held in self._objects.values():
            self._check_end(held)
            if held.since is not None:
                self._unspan(held, states)
            self._host_gone(held, states)

    def _check_end(self, held: _Object) -> None:
        o = held.o
        place = "hbm" if held.mapped else "host" if held.host == held.whole else "nowhere"
        kept = place == o.start or (o.start in ("-", "dropped") and not held.mapped)
        if not kept:
            self._refuse("end-state", f"{o.name} starts {_where(o.start)} and ends {_where(place)}", None, o)
        elif o.start == "hbm" and o.class_ in LASTING and held.contents != held.whole:
            self._refuse("end-state", f"{o.name} starts with contents and ends without", None, o)

    # ---- steps

    def _step(self, at: At) -> None:
        match at.step:
            case Map(imported=True) | Unmap(imported=True):
                return
            case Map(object=name):
                self._attach(at, self._objects[name], filled=False)
            case Fetch(object=name):
                self._fetch(at, self._objects[name])
            case Offload(object=name):
                self._offload(at, self._objects[name])
            case Unmap(object=name):
                self._unmap(at, self._objects[name])
            case Drop(object=name):
                self._drop(at, self._objects[name])
            case _:
                self._use(at)
        self._forget_after_last_use(at)

    def _attach(self, at: At, held: _Object, filled: bool) -> None:
        if held.mapped:
            self._refuse("double-map", f"{held.o.name} is mapped already", at, held.o)
            return
        held.since = at.index + 1
        held.contents = held.whole if filled else frozenset()
        held.gone = ""

    def _fetch(self, at: At, held: _Object) -> None:
        if held.host != held.whole:
            self._refuse("no-host-copy", f"{held.o.name} has no valid host copy{held.gone}", at, held.o)
        self._attach(at, held, filled=True)

    def _offload(self, at: At, held: _Object) -> None:
        self._keep_boundary(at, held)
        if not held.mapped:
            self._refuse("not-held", f"{held.o.name} is not mapped{held.gone}", at, held.o)
        elif held.contents != held.whole:
            self._refuse("offload-undefined", f"{held.o.name} has not been produced", at, held.o)
        self._host_filled(at, held, held.whole)
        self._detach(at, held)

    def _unmap(self, at: At, held: _Object) -> None:
        self._keep_boundary(at, held)
        if not held.mapped:
            self._refuse("not-held", f"{held.o.name} is not mapped{held.gone}", at, held.o)
        if held.o.class_ == "permanent" and held.host != held.whole:
            self._refuse("permanent-lost", f"{held.o.name} is permanent and has no valid host copy", at, held.o)
        self._detach(at, held)

    def _drop(self, at: At, held: _Object) -> None:
        self._keep_boundary(at, held)
        if held.o.class_ == "permanent":
            self._refuse("permanent-lost", f"{held.o.name} is permanent", at, held.o)
            return
        if not held.mapped and not held.host:
            self._refuse("not-held", f"{held.o.name} is nowhere{held.gone}", at, held.o)
        self._detach(at, held)
        held.dropped = True
        if not held.o.host_backed:
            held.host = frozenset()
            self._host_gone(held, at.index)

    def _detach(self, at: At, held: _Object) -> None:
        if held.since is not None:
            self._unspan(held, at.index)
        held.contents, held.dropped = frozenset(), False
        held.gone = f" (step {at.index}, {describe(at.step)}, released it)"

    def _keep_boundary(self, at: At, held: _Object) -> None:
        """Boundary state stays in HBM from its production to its last use (paper section 3.2)."""
        later = self._later_use(at, held.o.name)
        if held.o.class_ == "boundary" and held.contents and later is not None:
            self._refuse("boundary-moved", f"{held.o.name} is still to be used by {later}", at, held.o)

    def _later_use(self, at: At, name: str) -> At | None:
        steps = self.facts.programs[self.process]
        later = (At(self.process, i, steps[i]) for i in range(at.index + 1, len(steps)))
        return next((b for b in later if name in (*reads(b.step), *streams(b.step))), None)

    # ---- uses

    def _use(self, at: At) -> None:
        for name in reads(at.step):
            if name in self._objects:
                self._read(at, self._objects[name])
        for name in streams(at.step):
            self._stream(at, self._objects[name])
        for name in writes(at.step):
            self._write(at, self._objects[name])
        if isinstance(at.step, UpdateChunk):
            self._update_in_place(at, at.step)

    def _read(self, at: At, held: _Object) -> None:
        parts = self._parts(at, held)
        if self._is_mapped(at, held, "reads") and not parts <= held.contents:
            kind, missing = ("dropped-needed" if held.dropped else "not-produced"), sorted(parts - held.contents)
            slot = f" (slot {missing[0]})" if held.o.slots > 1 else ""
            self._refuse(kind, f"it reads {held.o.name}{slot}, whose pages hold nothing yet{held.gone}", at, held.o)
            held.contents |= parts

    def _is_mapped(self, at: At, held: _Object, verb: str) -> bool:
        if held.mapped:
            return True
        kind = "dropped-needed" if held.dropped else "not-mapped"
        self._refuse(kind, f"it {verb} {held.o.name}, which is not mapped{held.gone}", at, held.o)
        # Go on as if it were there: one missing step is one violation.
        held.since, held.contents, held.dropped = at.index, held.whole, False
        return False

    def _write(self, at: At, held: _Object) -> None:
        self._is_mapped(at, held, "writes")
        if held.o.host_backed:
            self._refuse("frozen-written", f"it writes {held.o.name}, whose host copy must stay valid", at, held.o)
        elif isinstance(at.step, Run) and held.o.class_ in LASTING:
            self._refuse("write-outside-update", f"it writes {held.o.name}, which is {held.o.class_}", at, held.o)
        if self._completes(at, held):
            held.contents |= self._parts(at, held)
            held.dropped = False
        self._stale(at, held)

    def _completes(self, at: At, held: _Object) -> bool:
        """A snapshot is there when its last chunk is written."""
        step = at.step
        chunked = isinstance(step, UpdateChunk) and held.o.class_ == "regenerable"
        return not chunked or self._last_chunk.get(step.role) == at.index  # type: ignore[union-attr]

    def _update_in_place(self, at: At, step: UpdateChunk) -> None:
        """Adam changes master weights and moments where they are: a host copy from before is stale (section 3.2)."""
        for name in step.reads:
            held = self._objects[name]
            if held.o.class_ != "permanent":
                continue
            if held.host and name not in step.writes:
                what = f"it changes {name} but does not list it in writes: its host copy would be taken for valid"
                self._refuse("chunk-state", what, at, held.o)
            self._stale(at, held)

    def _stale(self, at: At, held: _Object) -> None:
        held.host -= self._parts(at, held)
        if not held.host:
            self._host_gone(held, at.index)

    def _stream(self, at: At, held: _Object) -> None:
        parts = self._parts(at, held)
        if isinstance(at.step, Run) and at.step.task in SAVES and held.o.class_ == "phase-local":
            self._host_filled(at, held, parts)
        elif not parts <= held.host and not (held.mapped and parts <= held.contents):
            slot = f" (slot {min(parts)})" if held.o.slots > 1 else ""
            what = f"it streams {held.o.name}{slot}, which is neither at the host nor in HBM{held.gone}"
            self._refuse("no-host-copy", what, at, held.o)
            held.host |= held.whole

    def _parts(self, at: At, held: _Object) -> frozenset[int]:
        parts = self.facts.parts(at.step, held.o)
        if not parts <= held.whole:
            self._refuse("slot", f"{held.o.name} has {held.o.slots} slots", at, held.o)
        return parts & held.whole

    # ---- bytes

    def _unspan(self, held: _Object, last: int) -> None:
        assert held.since is not None
        self.spans.append(Span(held.o.name, self.process, held.since, last))
        held.since = None

    def _host_filled(self, at: At, held: _Object, parts: frozenset[int]) -> None:
        held.host |= parts
        if held.host_since is None:
            held.host_since = at.index + 1

    def _host_gone(self, held: _Object, last: int) -> None:
        if held.host_since is not None:
            self.host_spans.append(Span(held.o.name, self.process, held.host_since, last))
        held.host_since = None

    def _forget_after_last_use(self, at: At) -> None:
        """State that does not outlive an iteration gives its place in the pinned pool back after its last use."""
        for name in names(at.step):
            held = self._objects.get(name)
            passing = held is not None and held.o.class_ not in LASTING
            if held is not None and passing and held.host_since is not None and at.index >= held.last_use:
                self._host_gone(held, at.index)

    def _refuse(self, kind: str, what: str, at: At | None, o: PlannedObject) -> None:
        new = Violation(kind, what, at, o.name, o.bytes, where=f"{self.process}, {o.name}")
        if new not in self.violations:
            self.violations.append(new)


def _where(place: str) -> str:
    return {"hbm": "in HBM", "host": "at the host", "-": "nowhere"}.get(place, place)


def replay(facts: Facts) -> dict[str, Replay]:
    """Every program that owns objects, replayed."""
    owning = dict.fromkeys(o.process for o in facts.objects.values())
    return {process: Replay(facts, process).run() for process in owning}


def check_residency(replays: dict[str, Replay]) -> Iterator[Violation]:
    """What the replays found."""
    for one in replays.values():
        yield from one.violations
