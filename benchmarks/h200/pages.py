"""The page of results: schedules, memory by GPU and window, what was measured beside them, what does not hold.

| schedule              | step s            | over serial | .. | gap, no update | gap, last (updates) | exchange MB | ..
| rollplex, MPS default | 5.99 (5.87..6.10) | 0.96x       | .. | 0.0256         | 0.0256 (3)          | 3088        | ..
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

from benchmarks.h200 import exchange
from benchmarks.h200.parts import Found
from benchmarks.h200.ran import Gpu, Ran
from benchmarks.h200.surface import surface
from benchmarks.h200.verdict import GIB, GOALS, IN_FLIGHT, problems, serial_of, summary
from benchmarks.page import table
from rollplex.ir.calibration import Calibration

BEFORE = {"NCCL": 303, "direct": 390}
"""GB/s that a GPU received on such a pair, measured before: one call of 2 GiB."""
DASHES = ("-",) * 4


def page(found: Found, heading: str, gap: float, named: str, beside: Calibration, most: float = inf) -> str:
    """All that is there, under what it was measured with; `named` is the plan whose windows are told one by one.

    `gap` bounds the logprob gap in nats, `most` the seconds of the fastest schedule's step.
    """
    step = f"; of a step {most:g} s" if most < inf else ""
    lines = [heading, "", f"{GOALS} Bound of the gap here: {gap:g} nats{step}."]
    for part in (_runs(found.runs, named), _exchange(found.exchanged), list(_beside(found)), _soak(found.soak)):
        lines += ["", *part] if part else []
    if found.calibration:
        lines += ["", *surface(found.calibration, beside)]
    if found.missing:
        lines += ["", f"Not run yet: {'; '.join(found.missing)}."]
    wrong = list(problems(found, gap, most))
    return "\n".join([*lines, "", *wrong, *([""] if wrong else []), summary(found, gap, most)]) + "\n"


def _runs(runs: list[Ran], named: str) -> list[str]:
    if not runs:
        return []
    shown = next((r for r in runs if r.name == named), runs[min(1, len(runs) - 1)])
    starts = [
        f"{r.name}: {r.seconds:.0f} s in all; {p}: {', '.join(r.stages(p))}" for r in runs for p in ("start", "end")
    ]
    return [*schedules(runs), "", *memory(runs), "", f"Windows of {shown.name}:", "", *windows(shown), "", *starts]


def schedules(runs: list[Ran]) -> list[str]:
    """A row a run: seconds a step, what of them was hidden, how far both engines were apart, what came from peers."""
    head = ("schedule", "step s", "over serial", "predicted s", "T_D s", "T_P s", "in decode s", "d_D s", "gained s")
    head = (*head, "bound s", "of the bound", "T_post s", "in decode s", "gap, no update", "gap, last (updates)")
    head = (*head, "publish ms", "exchange MB", "exchange ms", "exchange GB/s")
    return table(head, [(r.name, *_times(r, serial_of(r, runs)), *_gaps(r), *_published(r)) for r in runs])


def _times(r: Ran, serial: Ran | None) -> tuple[str, ...]:
    over = f"{serial.step.mean / r.step.mean:.2f}x" if serial else "-"
    step = (str(r.step), over, f"{r.plan.summary.times.step_s:.2f}")
    parts = tuple(str(r.overlap(name)) for name in ("decode_s", "prefix_s", "hidden_s"))
    hidden = DASHES if serial is None or r is serial else _hidden(r, serial)
    return (*step, *parts, *hidden, str(r.overlap("post_s")), f"{r.overlap('post_hidden_s').mean:.2f}")


def _hidden(r: Ran, serial: Ran) -> tuple[str, ...]:
    bound, gained = r.bound(serial), r.gained(serial)
    share = f"{gained / bound:.0%}" if bound > 0 else "-"
    return f"{r.longer(serial):.2f}", f"{gained:.2f}", f"{bound:.2f}", share


def _gaps(r: Ran) -> tuple[str, str]:
    gaps = r.gaps()
    return f"{gaps[0]:.4g}", f"{gaps[-1]:.4g} ({len(gaps) - 1})"


def _published(r: Ran) -> tuple[str, ...]:
    seconds, rate = r.exchange()
    sent = (f"{r.sent() / 1e6:.0f}", f"{seconds * 1e3:.2f}", f"{rate:.0f}") if seconds else ("-",) * 3
    return (f"{r.publish.mean * 1e3:.1f}", *sent)


def memory(runs: list[Ran]) -> list[str]:
    """A row a run and GPU: bytes of windows against the plan, and whether the actor is there twice."""
    head = ("schedule", "GPU", "planned peak GiB", "measured", "windows off by", "as planned", "driver's peak GiB")
    head = (*head, "driver against plan, least", "most", "at start: driver", "planned pages", "the rest")
    rows = [(r.name, *_memory(r, gpu)) for r in runs for gpu in r.gpus]
    return table((*head, "planned for it", "one actor", "second copy, bytes"), rows)


def _memory(r: Ran, gpu: Gpu) -> tuple[str, ...]:
    pages, off = r.pages(gpu), r.driven_off(gpu) or [(0.0, "no sample")]
    planned = (f"{r.plan.summary.peak_hbm_bytes / GIB:.1f}", f"{r.peak() / GIB:.1f}", f"{r.windows_off():.1%}")
    ends = tuple(f"{share:+.1%} in {window}" for share, window in (off[0], off[-1]))
    bytes_ = (gpu.at_start, pages, gpu.at_start - pages, r.allowed(gpu), r.actor_bytes())
    start = tuple(f"{n / GIB:.2f}" for n in bytes_)
    as_planned = "yes" if r.report["memory_as_planned"] else "NO"
    peak = f"{max(gpu.driven.values(), default=0) / GIB:.1f}"
    return str(gpu.device), *planned, as_planned, peak, *ends, *start, f"{r.second_copy(gpu):,}"


def windows(r: Ran) -> list[str]:
    """A row a window: planned, by the ledgers of the GPU that differs most, and by the driver of each."""
    ledger, rows = {row["window"]: row["measured"] for row in r.report["memory"]}, []
    for window in r.plan.summary.windows:
        cells = [f"{window.hbm_bytes / GIB:.2f}", f"{ledger.get(window.name, 0) / GIB:.2f}"]
        for gpu in r.gpus:
            used, planned = gpu.driven.get(window.name), gpu.ranks * window.hbm_bytes
            cells.append("-" if used is None else f"{used / GIB:.2f} ({used / planned - 1:+.1%})")
        rows.append((window.name, *cells))
    head = ("window", "planned GiB", "by ledgers", *(f"GPU {gpu.device} GiB" for gpu in r.gpus))
    return table(head, rows)


def _exchange(found: list[dict[str, Any]] | None) -> list[str]:
    if found is None:
        return []
    rates = ", ".join(f"{way} {rate} GB/s" for way, rate in BEFORE.items())
    return [*exchange.page(found), "", f"Measured before on such a pair, one call of 2 GiB: {rates}."]


def _beside(found: Found) -> Iterator[str]:
    """The stream and publication on one GPU."""
    if s := found.stream:
        up, back = s.rates(IN_FLIGHT)
        yield (
            f"Optimizer stream, {s.millions} M parameters, {IN_FLIGHT} chunks in flight: {up:.1f} GB/s to the GPU and "
            f"{back:.1f} back; the link each way at once {s.link[2]:.1f}: {s.share(IN_FLIGHT):.0%} of it."
        )
    if p := found.published:
        yield (
            f"Publication of {p.nbytes / GIB:.2f} GiB: in place {p.in_place * 1e3:.2f} ms ({p.rebuilt / GIB:.2f} GiB "
            f"rebuilt); gather {p.gather * 1e3:.2f} and load {p.load * 1e3:.2f} ms, in one process, with "
            f"{2 * p.nbytes / GIB:.1f} GiB more."
        )


def _soak(soak: Ran | None) -> list[str]:
    if soak is None:
        return []
    job, done, gaps = soak.job, len(soak.report["metrics"]), soak.gaps()
    tp = f"training at TP {job.train_tp}, rollout at TP {job.rollout_tp} x {job.engines}"
    told = f"step {soak.step} s, logprob gap at most {max(gaps, default=float('nan')):.4g} nats"
    return [f"{done} of {job.run.steps} steps, {tp}, sharing {job.sharing.kind}: {told}."]
