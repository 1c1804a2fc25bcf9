"""What does not hold of the runs, and the last line, which says so.

step 3 of serial: trainer and rollout engine are 0.0712 nats apart, over 0.05
streamed: GPU 1 has 42.10 GiB in use in P3 publish, 7.9% over its plan of 39.00 GiB
rollplex, solved share: gains 0.14 s, and 0.15 s are gained without a partition
soak FAILED: train 1 (pid 71) was killed by SIGABRT in step `run prefix actor mb 2`, ..
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isnan

from benchmarks.h200.parts import Found
from benchmarks.h200.ran import Ran

GIB = 2**30
GAP, PERCENT, UPDATES, IN_FLIGHT, LINK = 0.05, 5, 3, 3, 0.85
GOALS = (
    f"Goals: {UPDATES} updates and more on several GPUs, each step's logprob gap within its bound; objects as planned, "
    f"bytes by window within {PERCENT}% of the plan by the engines' ledgers and at most so much over it by each GPU's "
    "driver (a plan reserves what engines may take); no second copy of the actor on any GPU; no hang; a solved share "
    f"gains more than MPS default and is faster than serial; the optimizer's stream has {LINK:.0%} of the duplex link; "
    "new weights are published faster than by gathering and loading them."
)


def problems(found: Found, gap: float, most: float = inf) -> Iterator[str]:
    """A line each; none where all holds."""
    yield from found.failed
    for ran in found.runs:
        yield from _gaps(ran, gap)
        yield from _bytes(ran)
    yield from _shares(found.runs)
    if found.runs and (fastest := min(found.runs, key=lambda r: r.step.mean)).step.mean > most:
        yield f"{fastest.name}: a step takes {fastest.step.mean:.2f} s, over {most:g}, and no other takes less"
    if found.soak:
        yield from _gaps(found.soak, gap)
        yield from _ended(found.soak)
    yield from _beside(found)


def _beside(found: Found) -> Iterator[str]:
    """What is measured without a run."""
    if found.exchanged and not all(rank["right"] for rank in found.exchanged):
        yield "exchange: values did not come as they were sent"
    if (s := found.stream) and s.share(IN_FLIGHT) < LINK:
        yield f"optimizer stream: {s.share(IN_FLIGHT):.1%} of the duplex link, under {LINK:.0%}"
    if (p := found.published) and p.in_place >= p.gather + p.load:
        yield f"publication: {p.in_place * 1e3:.1f} ms in place, {(p.gather + p.load) * 1e3:.1f} ms by gather and load"


def _shares(runs: list[Ran]) -> Iterator[str]:
    """Solved shares against the serial run, and against the one that shares by MPS default and is like it otherwise."""
    for ran in (r for r in runs if r.job.sharing.kind == "solved"):
        serial, default = serial_of(ran, runs), next((r for r in runs if _by_default(r, ran)), None)
        if serial is None or default is None:  # no comparison was asked for, or its other side has failed
            continue
        if ran.step.mean >= serial.step.mean:
            yield f"{ran.name}: a step takes {ran.step.mean:.2f} s, serial {serial.step.mean:.2f} s"
        if (own := ran.gained(serial)) <= (others := default.gained(serial)):
            yield f"{ran.name}: gains {own:.2f} s, and {others:.2f} s are gained without a partition"


def _by_default(run: Ran, solved: Ran) -> bool:
    """Whether a run is the solved one's but for its sharing; what was measured is read by the solved one alone."""
    sharing, cluster = run.job.sharing, run.job.cluster.model_copy(update={"calibration": None})
    other = solved.job.cluster.model_copy(update={"calibration": None})
    like = solved.job.model_copy(update={"sharing": sharing, "cluster": other})
    return sharing.kind == "mps" and run.job.model_copy(update={"cluster": cluster}) == like


def _gaps(ran: Ran, gap: float) -> Iterator[str]:
    gaps = ran.gaps()
    for step, nats in enumerate(gaps):
        if isnan(nats):
            yield f"step {step + 1} of {ran.name}: nobody compared trainer and rollout engine"
        elif nats > gap:
            yield f"step {step + 1} of {ran.name}: trainer and rollout engine are {nats:.4g} nats apart, over {gap:g}"
    if len(ran.gpus) > 1 and len(gaps) <= UPDATES:
        yield f"{ran.name}: {len(gaps)} steps, and behind {UPDATES} updates comes step {UPDATES + 1}"


def _ended(ran: Ran) -> Iterator[str]:
    asked, done = ran.job.run.steps, len(ran.report["metrics"])
    if done < asked:
        yield f"{ran.name}: {done} of {asked} steps, it ended {ran.report['ended']}"


def _bytes(ran: Ran) -> Iterator[str]:
    if not ran.report["memory_as_planned"]:
        yield f"{ran.name}: objects are not as planned, see its report.json"
    if 100 * ran.windows_off() > PERCENT:
        yield f"{ran.name}: by the engines' ledgers a window is {ran.windows_off():.1%} off its plan, over {PERCENT}%"
    for gpu in ran.gpus:
        off, planned = ran.driven_off(gpu), ran.planned(gpu)
        if not off:
            yield f"{ran.name}: GPU {gpu.device} was not looked at in any window"
        for share, window in off:
            used, plan = gpu.driven[window], planned[window]
            if 100 * (used - plan) > PERCENT * plan:
                told = f"{used / GIB:.2f} GiB in use in {window}, {share:.1%} over its plan of {plan / GIB:.2f} GiB"
                yield f"{ran.name}: GPU {gpu.device} has {told}"
        if again := ran.second_copy(gpu):
            yield f"{ran.name}: GPU {gpu.device} has {again:,} bytes beside planned pages, room for the actor once more"


def serial_of(ran: Ran, runs: list[Ran]) -> Ran | None:
    """The serial run with the same rollout engines, itself for one that is."""
    return next((r for r in runs if r.plan.schedule == "serial" and r.job.rollout_tp == ran.job.rollout_tp), None)


def summary(found: Found, gap: float, most: float = inf) -> str:
    """The last line: figures, then whether all holds."""
    told = [_told(ran, serial_of(ran, found.runs)) for ran in found.runs] or ["no plan has run to its end"]
    if s := found.stream:
        told.append(f"optimizer stream {s.share(IN_FLIGHT):.0%} of the link")
    if p := found.published:
        told.append(f"publication {p.in_place * 1e3:.1f} ms, gather and load {(p.gather + p.load) * 1e3:.1f} ms")
    if found.exchanged:
        ms = {way: max(rank["ms"][way] for rank in found.exchanged) for way in found.exchanged[0]["ms"]}
        told.append("publication " + ", ".join(f"{way} {took:.1f} ms" for way, took in ms.items()))
    if found.runs:
        gaps = [nats for ran in found.runs for nats in ran.gaps()]
        told.append(f"logprob gap at most {max(gaps, default=float('nan')):.4g} of {gap:g} nats")
        told.append(f"windows within {max(r.windows_off() for r in found.runs):.1%} of the plan")
        over = max((share for r in found.runs for gpu in r.gpus for share, _ in r.driven_off(gpu)), default=0.0)
        told.append(f"drivers at most {over:+.1%}")
        told.append(f"second copy {max(r.second_copy(gpu) for r in found.runs for gpu in r.gpus)} bytes")
    if found.soak and not any(_ended(found.soak)):
        told.append(f"{len(found.soak.report['metrics'])} steps, no hang")
    return "; ".join([*told, *_whole(found, gap, most)])


def _whole(found: Found, gap: float, most: float) -> Iterator[str]:
    if found.missing:
        yield f"parts not run yet: {len(found.missing)}"
    if wrong := len(list(problems(found, gap, most))):
        yield f"{wrong} DO NOT HOLD, above"
    elif found.runs:
        yield "all holds"


def _told(ran: Ran, serial: Ran | None) -> str:
    if serial is None:
        return f"{ran.name} {ran.step.mean:.2f} s"
    bound = ran.bound(serial)
    share = f", {ran.gained(serial) / bound:.0%} of the bound" if ran is not serial and bound > 0 else ""
    return f"{ran.name} {ran.step.mean:.2f} s ({serial.step.mean / ran.step.mean:.2f}x{share})"
