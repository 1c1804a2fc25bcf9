"""One run of a plan on a GPU, with what its driver counted meanwhile: the figures of the table, each by its formula.

T_D, T_P    decode and prefixes of the serial schedule, alone           d_D    what prefixes beside it add to decode
gained      T_D + T_P - (time in which decode or prefixes ran)          bound  min(T_P - d_D, T_D), paper equation 1

Steps but the first, which measures workspaces, are repeats: means, least and most.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollplex.backends.memory.planned import is_temporary
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan

Slice = tuple[str, int, int]
Within = Callable[[int, int], list[int]]


@dataclass(frozen=True)
class Repeats:
    """A figure of every step that counts."""

    each: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.each) / len(self.each)

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({min(self.each):.2f}..{max(self.each):.2f})"


@dataclass(frozen=True)
class Ran:
    """A plan, its report, windows of the first training rank as its trace has them, and the driver's bytes in each.

    `before` is what was in use before the run; `seconds` those of the command.
    """

    name: str
    plan: Plan
    report: dict[str, Any]
    slices: tuple[Slice, ...]
    before: int
    within: Within
    seconds: float

    @property
    def job(self) -> Job:
        return Job.model_validate(self.plan.job)

    # ---- time

    def of(self, figure: Callable[[dict[str, Any]], float]) -> Repeats:
        """A figure of each step but the first."""
        return Repeats(tuple(figure(step) for step in self.report["steps"][1:] or self.report["steps"]))

    def overlap(self, name: str) -> Repeats:
        """`decode_s`, `prefix_s`, `hidden_s`, `post_s`, `post_hidden_s`."""
        return self.of(lambda step: step["overlap"][name])

    @property
    def step(self) -> Repeats:
        return self.of(lambda step: step["step_s"])

    @property
    def publish(self) -> Repeats:
        """Work of the last window: from the last chunk of the update to the barrier behind which rollout may read."""
        return self.of(lambda step: step["windows"].get(self.plan.summary.windows[-1].name, 0.0))

    def gained(self, serial: Ran) -> float:
        """Seconds of decode and prefixes that are not waited for any more."""
        parts = [self.overlap(name).mean for name in ("decode_s", "prefix_s", "hidden_s")]
        alone = serial.overlap("decode_s").mean + serial.overlap("prefix_s").mean
        return alone - (parts[0] + parts[1] - parts[2])

    def longer(self, serial: Ran) -> float:
        """d_D: what decode takes more than alone."""
        return self.overlap("decode_s").mean - serial.overlap("decode_s").mean

    def bound(self, serial: Ran) -> float:
        """The most that can be gained with that decode."""
        return min(serial.overlap("prefix_s").mean - self.longer(serial), serial.overlap("decode_s").mean)

    def stages(self, phase: str) -> Iterator[str]:
        """`train 0 taking memory 1.2`, each stage of a phase."""
        rows = (row for row in self.report["stages"] if row["phase"] == phase)
        yield from (f"{row['process']} {row['stage']} {row['seconds']:.1f}" for row in rows)

    # ---- bytes

    def windows_off(self) -> float:
        """Largest deviation of a window's bytes as counted by the engines' ledgers from the plan, 0 to 1."""
        return max(abs(row["measured"] - row["planned"]) / row["planned"] for row in self.report["memory"])

    def peak(self) -> int:
        """Most bytes of a window, as the engines count them."""
        return max(row["measured"] for row in self.report["memory"])

    def driven(self) -> dict[str, int]:
        """The driver's most bytes in each window that it was asked in, of the run alone, the first step left out."""
        found: dict[str, int] = {}
        first = next((stop for name, _, stop in self.slices if name == self.plan.summary.windows[-1].name), 0)
        for name, start, stop in self.slices:
            for used in self.within(start, stop) if start >= first else ():
                found[name] = max(found.get(name, 0), used - self.before)
        return found

    def driven_off(self) -> tuple[float, str]:
        """The window in which the driver's most bytes differ most from the plan: by how much of it, and its name."""
        planned = {window.name: window.hbm_bytes for window in self.plan.summary.windows}
        off = [(n / planned[name] - 1.0, name) for name, n in self.driven().items() if name in planned]
        return max(off, key=lambda pair: abs(pair[0]), default=(0.0, "no sample"))

    def at_start(self) -> tuple[int, int]:
        """With all engines ready and no step begun: the driver's bytes of the run, and those of planned pages.

        Pages count once whichever processes map them, so a second copy of anything would be in the difference.
        """
        first = self.slices[0][1]
        used = self.within(first - 10**9, first)[-1:]
        assert used, f"{self.name}: the driver was not asked before the first step"
        pages = sum(o.bytes for o in self.plan.summary.objects if o.start == "hbm" and not is_temporary(o.name))
        return used[0] - self.before, pages

    def actor_bytes(self) -> int:
        """Of one copy of the actor's language model: a second one could not be smaller."""
        return self.plan.object(f"{self.job.policy}.snapshot").bytes

    def allowed(self) -> int:
        """What the plan has for contexts and the rollout engine's buffers, which have no pages of ours."""
        kinds = ("context", "runtime")
        return sum(o.bytes for o in self.plan.summary.objects if o.name.rpartition(".")[2] in kinds)

    def second_copy(self) -> int:
        """Bytes at the start that are neither planned pages nor smaller than one copy of the actor: 0 where none is."""
        used, pages = self.at_start()
        rest = used - pages
        return rest if rest >= self.actor_bytes() else 0


def read(folder: Path, name: str, plan: Plan, before: int, within: Within, seconds: float, rank: int = 0) -> Ran:
    """The run that has left its results in the folder; windows are those of a training rank."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return Ran(name, plan, report, tuple(windows_of(trace, rank)), before, within, seconds)


def windows_of(events: list[dict[str, Any]], rank: int = 0) -> Iterator[Slice]:
    """Name, start and stop in nanoseconds of every window of a training rank, in order."""
    origin = next(e["args"]["monotonic_ns"] for e in events if e["name"] == "time_0")
    pid = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == f"train {rank}")
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
    for e in events:
        if e["ph"] == "X" and e["pid"] == pid and names[e["tid"]] == "windows":
            start = origin + int(e["ts"] * 1e3)
            yield e["name"], start, start + int(e["dur"] * 1e3)
