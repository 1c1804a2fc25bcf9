"""What a run really held, set beside its plan: bytes of objects by window, places in the pinned pool, pieces that left.

memory.add(reports)        the ledgers' logs of one iteration, of every process
memory.objects(plan)       ObjectBytes("P1 decode", "rollout.kv", planned=262144, measured=262144, temporary=False)
memory.places(plan)        PlaceInPool("P1 decode", "actor.master", planned=(0, 180224), measured=(0, 180224))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollplex.backends.engine import EngineReport
from rollplex.backends.memory.ledger import Event, Mark
from rollplex.backends.memory.planned import is_temporary
from rollplex.backends.memory.usage import TOTAL, bytes_by_window, fullest_by_window, touched_by_window
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Drop, MapPart, Offload, Run, Unmap, UnmapPart
from rollplex.runtime.protocol import ProcessId


@dataclass(frozen=True)
class ObjectBytes:
    """One object in one window. A temporary's measured bytes are the peak torch allocated inside its reservation."""

    window: str
    object: str
    planned: int
    measured: int
    temporary: bool

    @property
    def as_planned(self) -> bool:
        """Memory that is handed out must be what was planned; temporaries must stay within it."""
        return self.measured <= self.planned if self.temporary else self.measured == self.planned


@dataclass(frozen=True)
class WindowBytes:
    """All of a device in one window; temporaries count with their reservation on both sides."""

    window: str
    planned: int
    measured: int


@dataclass(frozen=True)
class PieceBytes:
    """An object that leaves in pieces: bytes that were let go one after the other, in the step that differs most."""

    object: str
    planned: tuple[int, ...]
    measured: tuple[int, ...]


Place = tuple[int, int]


@dataclass(frozen=True)
class PlaceInPool:
    """Bytes [start, stop) of the pinned pool that an object had in a window; None: it was not there."""

    window: str
    object: str
    planned: Place | None
    measured: Place | None


@dataclass
class _Device:
    """The largest figure of each window and object on one GPU."""

    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    fullest: dict[str, dict[str, int]] = field(default_factory=dict)
    touched: dict[str, dict[str, int]] = field(default_factory=dict)
    released: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    pool: dict[str, set[str]] = field(default_factory=dict)
    puts: dict[str, set[Place]] = field(default_factory=dict)

    def add(self, reports: Mapping[str, EngineReport]) -> None:
        """One iteration's logs by process kind; windows are the training rank's."""
        events = [event for report in reports.values() for event in report.events]
        marks = reports["train"].marks
        let_go = [(e.object, e.nbytes) for e in sorted(events, key=lambda e: e.seq) if e.kind == "release"]
        for name in {name for name, _ in let_go}:
            self.released.setdefault(name, set()).add(tuple(n for other, n in let_go if other == name))
        self._add_pool([e for report in reports.values() for e in report.pool_events], reports["train"].pool_marks)
        for into, found in (
            (self.peaks, bytes_by_window(events, marks)),
            (self.fullest, fullest_by_window(events, marks)),
            (self.touched, touched_by_window(events, marks)),
        ):
            for window, rows in found.items():
                kept = into.setdefault(window, {})
                kept.update({name: max(kept.get(name, 0), nbytes) for name, nbytes in rows.items()})

    def _add_pool(self, events: Sequence[Event], marks: Sequence[Mark]) -> None:
        for event in events:
            if event.place is not None:
                self.puts.setdefault(event.object, set()).add(event.place)
        for window, held in bytes_by_window(events, marks).items():
            self.pool.setdefault(window, set()).update(held.keys() - {TOTAL})

    def places(self, plan: Plan) -> list[PlaceInPool]:
        """Planned and measured places of everything that either side has in the pinned pool, window by window."""
        planned, rows = {p.object: p for p in plan.summary.host_pool.offsets}, []
        for window in (w.name for w in plan.summary.windows):
            held = self.pool.get(window, set())
            for name in sorted({n for n, p in planned.items() if window in p.windows} | held):
                p = planned.get(name)
                wanted = (p.offset, p.offset + p.bytes) if p and window in p.windows else None
                found = self.puts.get(name, set()) if name in held else {None}
                rows += [PlaceInPool(window, name, wanted, place) for place in sorted(found, key=str)]
        return rows

    def windows(self, plan: Plan) -> list[int]:
        """Measured totals of the plan's windows."""
        return [self.peaks.get(window.name, {}).get(TOTAL, 0) for window in plan.summary.windows]

    def objects(self, plan: Plan) -> list[ObjectBytes]:
        """Planned and measured bytes of every object that either side has, window by window."""
        rows, parts = [], in_parts(plan)
        for window in plan.summary.windows:
            held = {n: b for n, b in self.peaks.get(window.name, {}).items() if n != TOTAL}
            then = self.fullest.get(window.name, {})
            held |= {name: then.get(name, 0) for name in parts & held.keys()}
            for name in sorted(window.by_object.keys() | held.keys()):
                temporary = is_temporary(name)
                measured = self.touched.get(window.name, {}).get(name, 0) if temporary else held.get(name, 0)
                rows.append(ObjectBytes(window.name, name, window.by_object.get(name, 0), measured, temporary))
        return rows


class MemoryLog:
    """The ledger logs of all iterations, GPU by GPU; its figures are of the GPU that differs most from the plan."""

    def __init__(self) -> None:
        self.devices: dict[int, _Device] = {}

    def add(self, reports: Mapping[ProcessId, EngineReport]) -> None:
        """One iteration's logs."""
        for gpu in sorted({process.rank for process in reports}):
            own = {process.kind: report for process, report in reports.items() if process.rank == gpu}
            self.devices.setdefault(gpu, _Device()).add(own)

    def windows(self, plan: Plan) -> list[WindowBytes]:
        """Planned and measured totals of the plan's windows."""
        measured = zip(*(device.windows(plan) for device in self.devices.values()), strict=True)
        rows = zip(plan.summary.windows, measured, strict=True)
        return [WindowBytes(w.name, w.hbm_bytes, max(m, key=lambda n: abs(n - w.hbm_bytes))) for w, m in rows]

    def objects(self, plan: Plan) -> list[ObjectBytes]:
        """Planned and measured bytes of every object that a GPU or the plan has, window by window."""
        rows: dict[tuple[str, str], ObjectBytes] = {}
        for device in self.devices.values():
            for row in device.objects(plan):
                kept = rows.setdefault((row.window, row.object), row)
                worse = (kept.as_planned, -abs(kept.measured - kept.planned))
                if (row.as_planned, -abs(row.measured - row.planned)) < worse:
                    rows[row.window, row.object] = row
        return list(rows.values())

    def pieces(self, plan: Plan) -> list[PieceBytes]:
        """Planned and measured bytes of what leaves in pieces, piece by piece."""
        rows = []
        for name, planned in planned_pieces(plan).items():
            found = {pattern for device in self.devices.values() for pattern in device.released.get(name, {()})}
            rows.append(PieceBytes(name, planned, max(found, key=lambda pattern: pattern != planned)))
        return rows

    def places(self, plan: Plan) -> list[PlaceInPool]:
        """Planned and measured places in the pinned pools, of every GPU, each row once."""
        return list(dict.fromkeys(row for device in self.devices.values() for row in device.places(plan)))


def in_parts(plan: Plan) -> set[str]:
    """Objects whose pages come or go part by part in the update."""
    steps = (step for program in plan.programs.values() for step in program)
    return {step.object for step in steps if isinstance(step, MapPart | UnmapPart)}


def planned_pieces(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Bytes of what leaves HBM in pieces, in order: beside a backward, behind chunks of the update.

    What has come back whole since leaves as a whole later.
    """
    found: dict[str, tuple[int, ...]] = {}
    for step in (step for program in plan.programs.values() for step in program):
        pieces = step.offloads if isinstance(step, Run) else [step] if isinstance(step, UnmapPart) else []
        for piece in pieces:
            found[piece.object] = (*found.get(piece.object, ()), piece.stop - piece.start)
        if isinstance(step, Unmap | Offload | Drop) and step.object in found:
            found[step.object] = (*found[step.object], plan.object(step.object).bytes)
    return found
