"""The parts of the page: plans, 200 steps, and what is measured beside them; each with how long it may take.

calibrate              `rollplex calibrate` of a job, where one is named; a solved share is compiled from its file
0 serial ..            a plan of the folder: schedules and ways to share
soak                   the plan of many steps, both of whose engines sum over all GPUs
exchange               two training ranks a rollout rank: new weights into the peer's half, by each way
publication            one GPU: new weights in place, or gathered and loaded
optimizer stream       pinned state through a ring of workspaces, against the link
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.h200.plans import HERE, SOAK
from benchmarks.h200.ran import Ran
from benchmarks.h200.running import Watch, called, devices, run
from benchmarks.h200.setup import Ready
from benchmarks.h200.state import State
from benchmarks.optimizer_gpu import Stream
from benchmarks.publication_gpu import Published
from rollplex.ir.calibration import Calibration, parse_calibration
from rollplex.ir.errors import RunError
from rollplex.ir.plan import Plan

MILLIONS = 512  # parameters of the optimizer's stream, whose state is pinned within seconds
ESTIMATES = {"plan": 110.0, "soak": 330.0, "exchange": 90.0, "publication": 60.0, "optimizer stream": 60.0}
"""Seconds that a part of a kind may take before one has been measured: a plan of a few steps starts and ends in 60."""
PATIENCE = 3.0
"""Times the estimate: what has not ended by then hangs, and leaves the rest of a command to the other parts."""
CALIBRATE = "calibrate"
STARTS_S = 100.0  # of `rollplex calibrate`, beside what it is given


@dataclass(frozen=True)
class Part:
    """A name, a kind, the digest of what is measured, seconds it may take, and the way to its figures (JSON)."""

    name: str
    kind: str
    digest: str
    estimate_s: float
    measure: Callable[[], Any]


@dataclass(frozen=True)
class Calibrating:
    """A job to calibrate, and seconds to do it in."""

    job: Path
    seconds: float


@dataclass
class Found:
    """All that has been measured so far; `failed` are parts that ended badly, with why, `missing` those not yet run."""

    runs: list[Ran] = field(default_factory=list)
    soak: Ran | None = None
    exchanged: list[dict[str, Any]] | None = None
    stream: Stream | None = None
    published: Published | None = None
    calibration: Calibration | None = None
    failed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def parts_of(ready: Sequence[Ready], runs: Path, watch: Watch, calibrating: Calibrating | None) -> Iterator[Part]:
    """In the order in which they are measured."""
    if calibrating:
        yield _calibrate(calibrating, runs)
    for each in ready:
        kind = "soak" if each.name == SOAK else "plan"
        yield Part(each.name, kind, each.digest, ESTIMATES[kind], partial(_ran, each, kind, runs, watch))
    plans = [each for each in ready if each.name != SOAK]
    shared = next((each for each in plans if (each.job.train_tp, each.job.q) == (2, 2)), None)
    if shared:
        yield _figures("exchange", "h200.exchange", runs, shared.digest, str(shared.file))
    elif plans:
        yield _figures("publication", "publication_gpu", runs, plans[0].digest, str(plans[0].file), *_gpu(plans[0]))
    if plans:
        yield _figures("optimizer stream", "optimizer_gpu", runs, str(MILLIONS), str(MILLIONS), *_gpu(plans[0]))


def _ran(ready: Ready, kind: str, runs: Path, watch: Watch) -> dict[str, Any]:
    """What one run of a plan has left."""
    out = runs / ready.name.partition(" ")[0]
    return run(ready.name, ready.file, out, watch, PATIENCE * ESTIMATES[kind]).data()


def _gpu(ready: Ready) -> tuple[str, str]:
    return "--gpu", str(next(iter(devices(ready.plan))))


def _figures(name: str, module: str, runs: Path, digest: str, *arguments: str) -> Part:
    """What a benchmark of its own process writes with --json."""

    def measure() -> Any:
        into = runs / f"{name}.json"
        command = [f"benchmarks.{module}", *arguments, "--json", str(into)]
        called(command, into.with_suffix(".log"), PATIENCE * ESTIMATES[name])
        return json.loads(into.read_text(encoding="utf-8"))

    return Part(name, name, digest, ESTIMATES[name], measure)


def _calibrate(asked: Calibrating, runs: Path) -> Part:
    estimate_s = asked.seconds + STARTS_S

    def measure() -> Any:
        into = runs / "calibration.json"
        command = ["rollplex.cli", "calibrate", str(asked.job), "--out", str(into), "--seconds", f"{asked.seconds:g}"]
        called(command, into.with_suffix(".log"), PATIENCE * estimate_s)
        return json.loads(into.read_text(encoding="utf-8"))

    if not asked.job.is_file():
        raise RunError("there is no such job", where=f"--calibrate {asked.job}", hint=str(HERE / "job_3b_x2.yaml"))
    digest = hashlib.sha256(f"{asked.job.read_text(encoding='utf-8')} {asked.seconds:g}".encode()).hexdigest()[:16]
    return Part(CALIBRATE, CALIBRATE, digest, estimate_s, measure)


def gathered(state: State, parts: Sequence[Part], ready: Sequence[Ready]) -> Found:
    """What the state has of these parts, and of a calibration that is not asked for again."""
    found, plans = Found(), {each.name: each.plan for each in ready}
    before = state.parts.get(CALIBRATE)
    if before and CALIBRATE not in [part.name for part in parts]:
        parts = [Part(CALIBRATE, CALIBRATE, before.digest, 0.0, lambda: before.found), *parts]
    for part in parts:
        if not state.has(part.name, part.digest):
            found.missing.append(part.name)
        elif (done := state.parts[part.name]).failed:
            found.failed.append(f"{part.name} FAILED: {done.failed}")
        else:
            _put(found, part, plans, done.found)
    return found


def _put(found: Found, part: Part, plans: Mapping[str, Plan], data: Any) -> None:
    match part.kind:
        case "plan":
            found.runs.append(Ran.of_data(part.name.partition(" ")[2] or part.name, plans[part.name], data))
        case "soak":
            found.soak = Ran.of_data(part.name, plans[part.name], data)
        case "exchange":
            found.exchanged = data
        case "publication":
            found.published = Published(**data)
        case "calibrate":
            found.calibration = parse_calibration(data, part.name)
        case _:
            seconds = {int(n): s for n, s in data["seconds"].items()}
            found.stream = Stream(data["millions"], tuple(data["link"]), seconds)
