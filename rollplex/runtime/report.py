"""What a run was like: reward by step, seconds by window, prefix hidden behind decode, bytes planned and measured.

reward      0.31 -> 0.78 over 40 steps
decode      1.92 s a step     prefix 0.80 s, 0.74 s of it (93 %) while the rollout process was decoding
memory      P1 decode         planned 61.2 MiB   measured 61.2 MiB   equal, object by object
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path
from statistics import fmean

from rollplex.backends.engine import EngineReport
from rollplex.backends.memory.planned import is_temporary
from rollplex.backends.memory.usage import TOTAL, bytes_by_window, fullest_by_window, touched_by_window
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Barrier, MapPart, Run, UnmapPart, Wait
from rollplex.runtime.intervals import Interval, common, length
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.sampling import SampledGroups
from rollplex.runtime.spans import Span

TRAIN = ProcessId("train", 0)


@dataclass(frozen=True)
class WindowTime:
    """Mean seconds of a window a step on the training rank, waiting included, beside the prediction."""

    window: str
    phase: str
    predicted_s: float
    measured_s: float
    waiting_s: float


@dataclass(frozen=True)
class Overlap:
    """Means a step. `hidden_s`: prefix work that ran while the rollout process was decoding; `post_hidden_s` of it that
    needs responses, scoring and training on groups (`post_s`), where the schedule is `streamed`.
    """

    decode_s: float
    prefix_s: float
    hidden_s: float
    post_s: float = 0.0
    post_hidden_s: float = 0.0

    @property
    def hidden_share(self) -> float:
        """Part of the prefix work that was hidden, 0 to 1."""
        return self.hidden_s / self.prefix_s if self.prefix_s else 0.0

    @property
    def post_hidden_share(self) -> float:
        """Part of the work on responses that was hidden, 0 to 1."""
        return self.post_hidden_s / self.post_s if self.post_s else 0.0


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


@dataclass
class Report:
    """Everything but the trace; `metrics` has one entry an iteration."""

    algorithm: str
    schedule: str
    steps_planned: int
    steps_done: int = 0
    ended: str = "complete"
    step_s: float = 0.0
    metrics: list[dict[str, float]] = field(default_factory=list)
    reward: str = ""
    sampling: SampledGroups | None = None
    times: list[WindowTime] = field(default_factory=list)
    overlap: Overlap = field(default_factory=lambda: Overlap(0.0, 0.0, 0.0))
    memory: list[WindowBytes] = field(default_factory=list)
    objects: list[ObjectBytes] = field(default_factory=list)
    pieces: list[PieceBytes] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        """The mean reward of every step."""
        return [row[self.reward] for row in self.metrics if self.reward in row]

    @property
    def memory_as_planned(self) -> bool:
        """Whether every object in every window was what the plan said."""
        return all(row.as_planned for row in self.objects) and all(p.planned == p.measured for p in self.pieces)


class TimeLog:
    """Times of one iteration after another, kept as sums; the first, in which workspaces are measured, counts only
    until there is a second.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._iterations = 0
        self._forget()

    def add(self, spans: Sequence[Span], step_s: float) -> None:
        """The spans of one iteration, and the seconds it took."""
        self._iterations += 1
        if self._iterations == 2:
            self._forget()
        self._counted += 1
        self._step_s += step_s
        overlap = measured_overlap(spans)
        self._overlap = [a + b for a, b in zip(self._overlap, astuple(overlap), strict=True)]
        for span in spans:
            if span.process == TRAIN:
                window = self._seconds.setdefault(span.step.window, [0.0, 0.0])
                window[0] += span.seconds
                window[1] += span.seconds if isinstance(span.step, Wait | Barrier) else 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self._step_s / max(1, self._counted)

    @property
    def overlap(self) -> Overlap:
        """Means over iterations."""
        return Overlap(*(total / max(1, self._counted) for total in self._overlap))

    def windows(self) -> list[WindowTime]:
        """Seconds of each window of the first training rank, means over iterations."""
        rows = []
        for window in self.plan.summary.windows:
            total, waiting = (t / max(1, self._counted) for t in self._seconds.get(window.name, (0.0, 0.0)))
            rows.append(WindowTime(window.name, window.phase, window.seconds, total, waiting))
        return rows

    def _forget(self) -> None:
        self._counted, self._step_s = 0, 0.0
        self._overlap = [0.0] * len(fields(Overlap))
        self._seconds: dict[str, list[float]] = {}


def measured_overlap(spans: Iterable[Span]) -> Overlap:
    """Decode, prefix and the work on responses, and what of them ran during decode on the first GPU, means a step."""
    found: dict[str, dict[int, list[Interval]]] = {}
    for span in spans:
        if span.process.rank == 0 and isinstance(span.step, Run) and span.step.task in KINDS:
            steps = found.setdefault(KINDS[span.step.task], {})
            steps.setdefault(span.iteration, []).append((span.start_ns, span.stop_ns))
    decode, prefix, post = (found.get(kind, {}) for kind in ("decode", "prefix", "post"))
    if not decode:
        return Overlap(0.0, 0.0, 0.0)
    each = []
    for i, decoding in sorted(decode.items()):
        before, behind = prefix.get(i, []), post.get(i, [])
        hidden = common(decoding, before), common(decoding, behind)
        each.append((length(decoding), length(before), hidden[0], length(behind), hidden[1]))
    return Overlap(*(fmean(column) / 1e9 for column in zip(*each, strict=True)))


KINDS = {"generate": "decode", "prefix": "prefix"} | dict.fromkeys(
    ("suffix", "whole", "train", "prefix_backward"), "post"
)
"""What a task is in the account of overlap."""


@dataclass
class _Device:
    """The largest figure of each window and object on one GPU."""

    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    fullest: dict[str, dict[str, int]] = field(default_factory=dict)
    touched: dict[str, dict[str, int]] = field(default_factory=dict)
    released: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)

    def add(self, reports: Mapping[str, EngineReport]) -> None:
        """One iteration's logs by process kind; windows are the training rank's."""
        events = [event for report in reports.values() for event in report.events]
        marks = reports["train"].marks
        let_go = [(e.object, e.nbytes) for e in sorted(events, key=lambda e: e.seq) if e.kind == "release"]
        for name in {name for name, _ in let_go}:
            self.released.setdefault(name, set()).add(tuple(n for other, n in let_go if other == name))
        for into, found in (
            (self.peaks, bytes_by_window(events, marks)),
            (self.fullest, fullest_by_window(events, marks)),
            (self.touched, touched_by_window(events, marks)),
        ):
            for window, rows in found.items():
                kept = into.setdefault(window, {})
                kept.update({name: max(kept.get(name, 0), nbytes) for name, nbytes in rows.items()})

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


def in_parts(plan: Plan) -> set[str]:
    """Objects whose pages come or go part by part in the update."""
    steps = (step for program in plan.programs.values() for step in program)
    return {step.object for step in steps if isinstance(step, MapPart | UnmapPart)}


def planned_pieces(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Bytes of the pieces in which objects leave HBM, in order: beside a backward, or behind chunks of the update."""
    found: dict[str, tuple[int, ...]] = {}
    for step in (step for program in plan.programs.values() for step in program):
        pieces = step.offloads if isinstance(step, Run) else [step] if isinstance(step, UnmapPart) else []
        for piece in pieces:
            found[piece.object] = (*found.get(piece.object, ()), piece.stop - piece.start)
    return found


def write_report(report: Report, path: Path) -> None:
    """report.json: everything, plus what is derived."""
    data = asdict(report)
    data["overlap"]["hidden_share"] = report.overlap.hidden_share
    data["overlap"]["post_hidden_share"] = report.overlap.post_hidden_share
    data["memory_as_planned"] = report.memory_as_planned
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
