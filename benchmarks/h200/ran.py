"""One run of a plan on GPUs, with what their drivers counted meanwhile: the figures of the page, each by its formula.

T_D, T_P    decode and prefixes of the serial schedule, alone           d_D    what prefixes beside it add to decode
gained      T_D + T_P - (time in which decode or prefixes ran)          bound  min(T_P - d_D, T_D), paper equation 1

Steps but the first, which measures workspaces, are repeats: means, least and most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import inf, isnan, nan
from typing import Any

from rollplex.backends.memory.planned import is_temporary
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan


def _nan_last(nats: float) -> float:
    return inf if isnan(nats) else nats


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
class Gpu:
    """A CUDA device on which so many training ranks stand: bytes of the run alone, as its driver counts them.

    `at_start` with all engines ready and no step begun; `driven` the most in each window that the driver was asked in,
    the first step left out.
    """

    device: int
    ranks: int
    at_start: int
    driven: dict[str, int]


@dataclass(frozen=True)
class Ran:
    """A plan, its report, what was seen of its GPUs, and seconds of new weights from peers, a step each.

    `seconds` are those of the command.
    """

    name: str
    plan: Plan
    report: dict[str, Any]
    gpus: tuple[Gpu, ...]
    exchanges: tuple[float, ...]
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

    # ---- trainer and rollout engine

    def gaps(self) -> list[float]:
        """Of each step, the i-th behind i updates: that of the rollout engine furthest away in nats; NaN without it."""
        engines = self.job.engines
        names = [f"logprob_gap_engine_{e}" for e in range(engines)] if engines > 1 else ["logprob_gap"]
        return [max((row.get(name, nan) for name in names), key=_nan_last) for row in self.report["metrics"]]

    # ---- new weights

    def sent(self) -> int:
        """Bytes that a GPU receives from its peers in a step."""
        return sum(step.nbytes for step in self.plan.programs["train"] if step.kind == "exchange" and step.group == "q")

    def exchange(self) -> tuple[float, float]:
        """Seconds of a step's exchange once all ranks are there, and GB/s that a GPU receives; 0 if none is timed."""
        seconds = sum(self.exchanges) / len(self.exchanges) if self.exchanges else 0.0
        return seconds, self.sent() / seconds / 1e9 if seconds else 0.0

    # ---- bytes

    def windows_off(self) -> float:
        """Largest deviation of a window's bytes as counted by the engines' ledgers from the plan, 0 to 1."""
        return max(abs(row["measured"] - row["planned"]) / row["planned"] for row in self.report["memory"])

    def peak(self) -> int:
        """Most bytes of a window, as the engines count them."""
        return max(row["measured"] for row in self.report["memory"])

    def planned(self, gpu: Gpu) -> dict[str, int]:
        """Bytes by window of all ranks of a device."""
        return {window.name: gpu.ranks * window.hbm_bytes for window in self.plan.summary.windows}

    def driven_off(self, gpu: Gpu) -> list[tuple[float, str]]:
        """How far the driver's most bytes are from the plan, by window, from the least to the most; 0.02 is 2% over."""
        planned = self.planned(gpu)
        return sorted((n / planned[name] - 1.0, name) for name, n in gpu.driven.items() if name in planned)

    def pages(self, gpu: Gpu) -> int:
        """Planned bytes at the start: pages count once whichever processes map them."""
        there = (o for o in self.plan.summary.objects if o.start == "hbm" and not is_temporary(o.name))
        return gpu.ranks * sum(o.bytes for o in there)

    def actor_bytes(self) -> int:
        """Of one copy of the actor's language model on a GPU: a second one could not be smaller."""
        return self.plan.object(f"{self.job.policy}.snapshot").bytes

    def allowed(self, gpu: Gpu) -> int:
        """What the plan has for contexts and the rollout engine's buffers, which have no pages of ours."""
        kinds = ("context", "runtime")
        return gpu.ranks * sum(o.bytes for o in self.plan.summary.objects if o.name.rpartition(".")[2] in kinds)

    def second_copy(self, gpu: Gpu) -> int:
        """Bytes at the start, beyond planned pages and contexts, that one copy of the actor would fit in; else 0.

        What is reserved for the rollout engine's buffers is not taken off: a copy could hide in it.
        """
        contexts = sum(o.bytes for o in self.plan.summary.objects if o.name.endswith(".context"))
        rest = gpu.at_start - self.pages(gpu) - gpu.ranks * contexts
        return rest if rest >= self.actor_bytes() else 0

    # ---- as JSON

    def data(self) -> dict[str, Any]:
        """All but name and plan."""
        gpus = [asdict(gpu) for gpu in self.gpus]
        return {"report": self.report, "gpus": gpus, "exchanges": list(self.exchanges), "seconds": self.seconds}

    @classmethod
    def of_data(cls, name: str, plan: Plan, data: dict[str, Any]) -> Ran:
        """What `data` said."""
        gpus = tuple(Gpu(**gpu) for gpu in data["gpus"])
        return cls(name, plan, data["report"], gpus, tuple(data["exchanges"]), data["seconds"])
