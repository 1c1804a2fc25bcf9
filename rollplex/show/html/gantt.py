"""The schedule as a Gantt picture: the work of rollout engine, trainer and controller, and what crosses the host link.

rollout     [ decode .................................. ]|                                      |          |
trainer     [prefix][prefix]                             | [score][train .....................] | [update] |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollplex.ir.plan import Plan
from rollplex.ir.planned_job import job_of
from rollplex.ir.steps import Barrier, Exchange, Fetch, Offload, Publish, Run, Signal, UpdateChunk
from rollplex.show.html.markup import Markup, el
from rollplex.show.html.scale import LEFT, RIGHT, Span, TimeScale
from rollplex.show.html.stack import CHARACTER, NAMES, svg, window_names
from rollplex.show.text import clip, seconds, size

LANE, GAP, TOP = 34.0, 8.0, 46.0


@dataclass(frozen=True)
class Bar:
    """A stretch of work in a lane."""

    lane: str
    kind: str
    name: str
    start: float
    end: float
    tip: str


def gantt_picture(plan: Plan, time: TimeScale) -> Markup:
    """The lanes, the barriers, and where prefix work is hidden behind decode."""
    bars = [*_rollout(plan, time), *_trainer(plan, time), *_controller(plan, time), *_link(plan, time)]
    lanes = list(dict.fromkeys(b.lane for b in bars))
    bottom = TOP + len(lanes) * (LANE + GAP)
    parts = (
        el("title", "The schedule of one iteration"),
        el("desc", "; ".join(f"{b.lane}: {b.tip}".replace("\n", ", ") for b in bars)),
        _overlap(bars, lanes, time),
        *(_lane(name, i, time) for i, name in enumerate(lanes)),
        *(_bar(b, lanes.index(b.lane)) for b in bars),
        _barriers(plan, time, bottom),
        window_names(time, bottom + 2),
    )
    return svg(time.width, bottom + 2 + NAMES, *parts)


# ---- the work of each lane


def _rollout(plan: Plan, time: TimeScale) -> Iterator[Bar]:
    """Decode runs from the window of its `generate` to the one that signals its end."""
    steps = plan.programs.get("rollout", ())
    begun = next((s.window for s in steps if isinstance(s, Run) and s.task == "generate"), None)
    ended = next((s.window for s in reversed(steps) if isinstance(s, Signal)), begun)
    if begun is None or ended is None:
        return
    start, end = time.span(begun), time.span(ended)
    times = plan.summary.times
    slowed = f", slowed by {seconds(times.interference_s)}" if times.interference_s else ""
    yield Bar("rollout", "decode", "decode", start.x, end.end, f"decode {seconds(times.decode_s)}{slowed}")


def _trainer(plan: Plan, time: TimeScale) -> Iterator[Bar]:
    """One bar for each window in which the trainer computes."""
    for span in time.spans:
        steps = [s for s in plan.programs.get("train", ()) if s.window == span.name]
        runs = [s for s in steps if isinstance(s, Run)]
        chunks = sum(isinstance(s, UpdateChunk) for s in steps)
        writes = [s for s in steps if isinstance(s, Exchange | Publish)]
        if not (runs or chunks or writes):
            continue
        kind = "prefix" if all(r.task == "prefix" for r in runs) and runs else "update" if not runs else "suffix"
        what = f"{len(runs)} steps" if runs else f"{chunks} chunks" if chunks else f"{len(writes)} exchanges"
        name = span.name.removeprefix(span.phase).strip()
        yield Bar("trainer", kind, name, span.x, span.end, f"{name}\n{seconds(span.seconds)}, {what}")


def _controller(plan: Plan, time: TimeScale) -> Iterator[Bar]:
    """Host functions, in the window in which the controller calls them."""
    runs = (s for s in plan.programs.get("controller", ()) if isinstance(s, Run) and s.task == "host")
    for node, window in dict.fromkeys((step.node, step.window) for step in runs):  # group by group under `streamed`
        span, called = time.span(window), plan.hosts.get(node, node)
        end = span.x + min(span.width, max(22.0, CHARACTER * len(called) + 12))
        yield Bar("controller", "host", called, span.x, end, f"{called} on the host\nwhile {span.name} waits for it")


def _link(plan: Plan, time: TimeScale) -> Iterator[Bar]:
    """What crosses the host link before or in a window, all of it one after the other."""
    rate = job_of(plan).device.host_link_gb_s * 1e9
    for span in time.spans:
        moved = [
            (step.kind, step.object)
            for process in plan.programs.values()
            for step in process
            if step.window == span.name and isinstance(step, Fetch | Offload)
        ]
        streamed = {o for p in plan.programs.values() for s in p if s.window == span.name for o in _streams(s)}
        rows = [*moved, *(("stream", name) for name in sorted(streamed))]
        if rows:
            yield _transfers(plan, span, rows, rate)


def _streams(step: object) -> tuple[str, ...]:
    return step.streams if isinstance(step, Run | UpdateChunk) else ()


def _transfers(plan: Plan, span: Span, rows: list[tuple[str, str]], rate: float) -> Bar:
    total = sum(plan.object(name).bytes for _, name in rows)
    share = min(1.0, total / rate / span.seconds) if rate and span.seconds else 1.0
    lines = [f"{kind} {plan.object(name).title} {size(plan.object(name).bytes)}" for kind, name in rows]
    tip = "\n".join([*lines, f"{seconds(total / rate)} of the link" if rate else ""])
    return Bar("host link", "link", size(total, 1), span.x, span.x + max(6.0, share * span.width), tip.strip())


# ---- drawing


def _lane(name: str, index: int, time: TimeScale) -> Markup:
    y = TOP + index * (LANE + GAP)
    back = el("rect", x=LEFT, y=y, width=time.width - LEFT - RIGHT, height=LANE, class_="lane")
    return el("g", back, el("text", name, x=LEFT - 8, y=y + LANE / 2 + 4, class_="tick lane-name"))


def _bar(bar: Bar, index: int) -> Markup:
    y, width = TOP + index * (LANE + GAP) + 3, bar.end - bar.start
    room = int((width - 10) / CHARACTER)
    shown = bar.name if len(bar.name) <= room else clip(bar.name, room) if room >= 6 else ""
    label = [el("text", shown, x=bar.start + 6, y=y + (LANE - 6) / 2 + 4, class_="label")] if shown else []
    rect = el("rect", x=bar.start + 0.5, y=y, width=width - 1, height=LANE - 6, rx=3, class_=f"work w-{bar.kind}")
    return el(
        "g", rect, *label, class_="task", tabindex=0, role="img", data_tip=bar.tip, aria_label=f"{bar.lane}: {bar.tip}"
    )


def _overlap(bars: list[Bar], lanes: list[str], time: TimeScale) -> Markup:
    """Where the trainer works while the rollout engine decodes: on prefixes, and on groups that are complete."""
    decode = next((b for b in bars if b.lane == "rollout"), None)
    trainer = [b for b in bars if b.lane == "trainer" and b.kind in ("prefix", "suffix")]
    both = [b for b in trainer if decode and decode.start <= b.start and b.end <= decode.end]
    height = len(lanes) * (LANE + GAP)
    return el("g", *(
        el("rect", x=b.start, y=TOP - 4, width=b.end - b.start, height=height, class_="overlap") for b in both
    ))  # fmt: skip


def _barriers(plan: Plan, time: TimeScale, bottom: float) -> Markup:
    """A line where all processes meet; names on two rows, so that close ones do not overlap."""
    marks, taken = [], [0.0, 0.0, 0.0]
    for step in plan.programs.get("train", ()):
        if not isinstance(step, Barrier):
            continue
        x, wide = time.span(step.window).end, CHARACTER * len(step.name) + 8
        row = next((i for i, end in enumerate(taken) if x - wide >= end), len(taken) - 1)
        taken[row] = x
        y = 38.0 - 13 * row
        marks.append(el("line", x1=x, x2=x, y1=y - 8, y2=bottom, class_="barrier"))
        marks.append(el("text", step.name, x=x - 4, y=y, class_="barrier-name"))
    return el("g", *marks)
