"""One object during a replay: its pages, its contents, its host copy, and the spans of states that they lasted."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollplex.ir.plan import PlannedObject

LASTING = ("permanent", "regenerable")
"""State that outlives an iteration; the contents of all other state end with it, even where its pages stay."""

Parts = frozenset[int]
Range = tuple[int, int]
NOTHING: Parts = frozenset()


@dataclass(frozen=True)
class Span:
    """An object that holds something in states first .. last of its owner: state i is when i steps are done.

    It is `nbytes` of it: all of them, but for pages that come or go part by part.
    """

    object: str
    process: str
    first: int
    last: int
    nbytes: int

    def covers(self, first: int, last: int) -> bool:
        """Whether it lasts through all of these states."""
        return self.first <= first and last <= self.last


@dataclass
class Spans:
    """What one program's objects held: pages, whole contents in them, and bytes of the pinned pool."""

    process: str
    pages: list[Span] = field(default_factory=list)
    contents: list[Span] = field(default_factory=list)
    host: list[Span] = field(default_factory=list)


@dataclass
class Held:
    """What is known of one object at one step; `filled`, `host_since` are the states in which each began.

    `pages` are the bytes that have some, with the states from which on: one range of all of them where none is cut.
    """

    o: PlannedObject
    spans: Spans
    contents: Parts = NOTHING
    host: Parts = NOTHING
    filled: int | None = None
    host_since: int | None = None
    gone: str = ""
    dropped: bool = False
    pages: dict[Range, int] = field(default_factory=dict)

    @classmethod
    def at_start(cls, o: PlannedObject, spans: Spans) -> Held:
        """Where the plan says the object is when an iteration begins."""
        held = cls(o, spans)
        lasting = o.class_ in LASTING
        if o.start == "hbm":
            held.attach(0, held.whole if lasting else NOTHING)
        if o.host_backed or (o.start == "host" and lasting):
            held.fill_host(0, held.whole)
        return held

    @property
    def whole(self) -> Parts:
        """All slots."""
        return frozenset(range(self.o.slots))

    @property
    def mapped(self) -> bool:
        """Whether it has pages."""
        return bool(self.pages)

    def covers(self, start: int, stop: int) -> bool:
        """Whether bytes [start, stop) have pages."""
        at = start
        for low, high in sorted(self.pages):
            at = high if low <= at < high else at
        return at >= stop

    def meets(self, start: int, stop: int) -> bool:
        """Whether any of bytes [start, stop) have pages."""
        return any(low < stop and start < high for low, high in self.pages)

    @property
    def complete(self) -> bool:
        """Whether all of its bytes have pages."""
        return self.covers(0, self.o.bytes)

    @property
    def place(self) -> str:
        """Where it is, as the plan writes it."""
        return "hbm" if self.mapped else "host" if self.host == self.whole else "-"

    # ---- changes; `state` is the first state after the change, or the last before it for what ends

    def attach(self, state: int, contents: Parts) -> None:
        """Pages, with these contents."""
        self.pages, self.gone = {(0, self.o.bytes): state}, ""
        self.fill(state, contents)

    def attach_part(self, state: int, start: int, stop: int) -> None:
        """Pages for some bytes, contents undefined."""
        self.pages[start, stop], self.gone = state, ""

    def detach_part(self, state: int, start: int, stop: int, why: str) -> None:
        """The pages of some bytes end, which have pages; with the last of them the contents."""
        kept = {}
        for (low, high), since in self.pages.items():
            if high <= start or stop <= low:
                kept[low, high] = since
                continue
            self._close(self.spans.pages, since, state, min(high, stop) - max(low, start))
            kept |= {r: since for r in ((low, start), (stop, high)) if r[0] < r[1]}
        self.pages = kept
        if not kept:
            self.detach(state, why)

    def fill(self, state: int, parts: Parts) -> None:
        """Contents in more slots."""
        self.contents |= parts
        if self.contents == self.whole and self.filled is None:
            self.filled = state

    def detach(self, state: int, why: str = "") -> None:
        """Pages and contents end."""
        for (start, stop), since in self.pages.items():
            self._close(self.spans.pages, since, state, stop - start)
        if self.filled is not None:
            self._close(self.spans.contents, self.filled, state)
        self.pages, self.filled = {}, None
        self.contents, self.gone, self.dropped = NOTHING, why, False

    def fill_host(self, state: int, parts: Parts) -> None:
        """A host copy of more slots."""
        self.host |= parts
        if self.host_since is None and parts:
            self.host_since = state

    def free_host(self, state: int) -> None:
        """The pinned pool has its bytes back."""
        if self.host_since is not None:
            self._close(self.spans.host, self.host_since, state)
        self.host_since = None

    def stale(self, state: int, parts: Parts) -> None:
        """A write in HBM: the host copy of these slots is worth nothing now."""
        self.host -= parts
        if not self.host:
            self.free_host(state)

    def _close(self, spans: list[Span], first: int, last: int, nbytes: int | None = None) -> None:
        nbytes = self.o.bytes if nbytes is None else nbytes
        spans.append(Span(self.o.name, self.spans.process, first, last, nbytes))
