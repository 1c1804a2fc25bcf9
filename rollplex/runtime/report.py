"""What a run was like: reward by step, seconds by window, prefix hidden behind decode, bytes planned and measured.

reward      0.31 -> 0.78 over 40 steps
decode      1.92 s a step     prefix 0.80 s, 0.74 s of it (93 %) while the rollout process was decoding
memory      P1 decode         planned 61.2 MiB   measured 61.2 MiB   equal, object by object
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path
from statistics import fmean

from rollplex.ir.plan import Plan
from rollplex.ir.steps import Barrier, Run, Wait
from rollplex.runtime.intervals import Interval, common, length
from rollplex.runtime.memorylog import ObjectBytes, PieceBytes, PlaceInPool, WindowBytes
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.sampling import SampledGroups
from rollplex.runtime.spans import Span
from rollplex.runtime.stages import StageTime

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
    needs responses, scoring and training on groups (`post_s`), where the schedule is `streamed`. `held_s`: before it
    ran, prefix work waited so long for its turn, where the sharing is `solved`; that is in none of the others.
    """

    decode_s: float
    prefix_s: float
    hidden_s: float
    post_s: float = 0.0
    post_hidden_s: float = 0.0
    held_s: float = 0.0

    @property
    def hidden_share(self) -> float:
        """Part of the prefix work that was hidden, 0 to 1."""
        return self.hidden_s / self.prefix_s if self.prefix_s else 0.0

    @property
    def post_hidden_share(self) -> float:
        """Part of the work on responses that was hidden, 0 to 1."""
        return self.post_hidden_s / self.post_s if self.post_s else 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. `windows` are those of the first training rank by name, without what it waited for others;
    the first step of a run measures workspaces, and counts in no mean if there is another.
    """

    step_s: float
    overlap: Overlap
    windows: dict[str, float]


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
    steps: list[StepTime] = field(default_factory=list)
    stages: list[StageTime] = field(default_factory=list)
    memory: list[WindowBytes] = field(default_factory=list)
    objects: list[ObjectBytes] = field(default_factory=list)
    pieces: list[PieceBytes] = field(default_factory=list)
    places: list[PlaceInPool] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        """The mean reward of every step."""
        return [row[self.reward] for row in self.metrics if self.reward in row]

    @property
    def memory_as_planned(self) -> bool:
        """Whether every object in every window was what the plan said, and where it said."""
        told = (*self.pieces, *self.places)
        return all(row.as_planned for row in self.objects) and all(row.planned == row.measured for row in told)


class TimeLog:
    """Times of one iteration after another, kept as sums; the first, in which workspaces are measured, counts only
    until there is a second. `steps` has each.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.steps: list[StepTime] = []
        self._forget()

    def add(self, spans: Sequence[Span], step_s: float) -> None:
        """The spans of one iteration, and the seconds it took."""
        if len(self.steps) == 1:
            self._forget()
        self._counted += 1
        self._step_s += step_s
        overlap = measured_overlap(spans)
        self._overlap = [a + b for a, b in zip(self._overlap, astuple(overlap), strict=True)]
        worked: dict[str, float] = {}
        for span in (span for span in spans if span.process == TRAIN):
            window = self._seconds.setdefault(span.step.window, [0.0, 0.0])
            waited = span.seconds if isinstance(span.step, Wait | Barrier) else 0.0
            window[0] += span.seconds + span.held_s
            window[1] += waited + span.held_s
            worked[span.step.window] = worked.get(span.step.window, 0.0) + span.seconds - waited
        self.steps.append(StepTime(step_s, overlap, worked))

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
    """Decode, prefix and the work on responses, and what of them ran during decode on the first GPU, means a step.

    A prefix that runs with its group is part of the work on responses.
    """
    found: dict[str, dict[int, list[Interval]]] = {}
    held: Counter[int] = Counter()
    seen = [(span, span.step) for span in spans if span.process.rank == 0 and isinstance(span.step, Run)]
    training = {(step.window, step.role) for _, step in seen if step.task == "train"}
    for span, step in seen:
        if step.task in KINDS:
            with_group = step.task == "prefix" and (step.window, step.role) in training
            steps = found.setdefault("post" if with_group else KINDS[step.task], {})
            steps.setdefault(span.iteration, []).append((span.start_ns, span.stop_ns))
            held[span.iteration] += span.held_ns
    decode, prefix, post = (found.get(kind, {}) for kind in ("decode", "prefix", "post"))
    if not decode:
        return Overlap(0.0, 0.0, 0.0)
    each = []
    for i, decoding in sorted(decode.items()):
        before, behind = prefix.get(i, []), post.get(i, [])
        hidden = common(decoding, before), common(decoding, behind)
        each.append((length(decoding), length(before), hidden[0], length(behind), hidden[1], held[i]))
    return Overlap(*(fmean(column) / 1e9 for column in zip(*each, strict=True)))


KINDS = {"generate": "decode", "prefix": "prefix"} | dict.fromkeys(
    ("suffix", "whole", "train", "prefix_backward"), "post"
)
"""What a task is in the account of overlap."""


def write_report(report: Report, path: Path) -> None:
    """report.json: everything, plus what is derived."""
    data = asdict(report)
    data["overlap"]["hidden_share"] = report.overlap.hidden_share
    data["overlap"]["post_hidden_share"] = report.overlap.post_hidden_share
    data["memory_as_planned"] = report.memory_as_planned
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
