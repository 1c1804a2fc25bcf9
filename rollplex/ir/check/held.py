"""One object during a replay: its pages, its contents, its host copy, and the spans of states that they lasted."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollplex.ir.plan import PlannedObject

LASTING = ("permanent", "regenerable")
"""State that outlives an iteration; the contents of all other state end with it, even where its pages stay."""

Parts = frozenset[int]
NOTHING: Parts = frozenset()


@dataclass(frozen=True)
class Span:
    """An object that holds something in states first .. last of its owner: state i is when i steps are done."""

    object: str
    process: str
    first: int
    last: int

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
    """What is known of one object at one step; `since`, `filled`, `host_since` are the states in which each began."""

    o: PlannedObject
    spans: Spans
    contents: Parts = NOTHING
    host: Parts = NOTHING
    since: int | None = None
    filled: int | None = None
    host_since: int | None = None
    gone: str = ""
    dropped: bool = False

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
        return self.since is not None

    @property
    def place(self) -> str:
        """Where it is, as the plan writes it."""
        return "hbm" if self.mapped else "host" if self.host == self.whole else "-"

    # ---- changes; `state` is the first state after the change, or the last before it for what ends

    def attach(self, state: int, contents: Parts) -> None:
        """Pages, with these contents."""
        self.since, self.gone = state, ""
        self.fill(state, contents)

    def fill(self, state: int, parts: Parts) -> None:
        """Contents in more slots."""
        self.contents |= parts
        if self.contents == self.whole and self.filled is None:
            self.filled = state

    def detach(self, state: int, why: str = "") -> None:
        """Pages and contents end."""
        if self.since is not None:
            self._close(self.spans.pages, self.since, state)
        if self.filled is not None:
            self._close(self.spans.contents, self.filled, state)
        self.since = self.filled = None
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

    def _close(self, spans: list[Span], first: int, last: int) -> None:
        spans.append(Span(self.o.name, self.spans.process, first, last))
