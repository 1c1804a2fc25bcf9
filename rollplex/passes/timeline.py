"""How long each window's compute takes, and how much of the decode window the trainer leaves idle."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.ir.job import Job
from rollplex.ir.lora import lora_of
from rollplex.ir.planned_layout import LayoutSummary
from rollplex.ir.work import role_work
from rollplex.passes.costs import INTERFERENCE_SHARE, Costs
from rollplex.passes.schedule import Schedule, Window
from rollplex.passes.work import decoded_bytes, one_copy, updated_parameters


@dataclass(frozen=True)
class Timeline:
    """Seconds of compute by window, without transfers; `overlap_s` is prefix time under the sharing policy.

    `compute` is each window's own work; `window` how long the window lasts, where decode runs beside the prefixes.
    `idle_s` is the part of the decode windows that the trainer's GPUs have free for transfers. `sampling_s` is the part
    of `decode_s` that no prefix may run beside: rounds of dynamic sampling before the last.
    """

    compute: dict[str, float]
    window: dict[str, float]
    idle_s: float
    decode_s: float
    prefix_s: float
    overlap_s: float
    interference_s: float
    post_s: float
    sampling_s: float = 0.0


@dataclass(frozen=True)
class Added:
    """What the layout of the weights adds to a step: to decode that reads them so, and to their publication."""

    decode_s: float = 0.0
    publish_s: float = 0.0

    @classmethod
    def of(cls, job: Job, layout: LayoutSummary) -> Added:
        """Of a plan's layout. A second copy is written in the rollout engine's own order: nothing is rebuilt."""
        if not one_copy(job):
            return cls(publish_s=layout.exchange_s)
        frozen = lora_of(job) is not None  # a base that is rebuilt once, when the engines start
        rebuild = 0.0 if frozen else sum(c.rebuild_s for c in layout.classes)
        return cls(sum(c.decode_s for c in layout.classes), layout.exchange_s + rebuild)


def window_seconds(job: Job, schedule: Schedule, added: Added) -> Timeline:
    """The timeline of a job under a schedule."""
    windows, overlapped = schedule.windows, schedule.overlapped
    *rounds, decode = _decode_s(job)
    decode += added.decode_s
    sampling, whole = sum(rounds), {c.node for c in schedule.calls if c.op == "whole"}
    seconds = {w.name: _window_s(job, w, w.node in whole) for w in windows if w.kind not in ("decode", "publish")}
    compute = {w.name: added.publish_s if w.kind == "publish" else seconds.get(w.name, 0.0) for w in windows}
    compute |= {"P1 sample": sampling, "P1 decode": decode} if rounds else {"P1 decode": decode}
    early = [w.name for w in windows if w.kind == "prefix" or (w.kind == "score" and w.phase == "P1")]
    prefix = sum(compute[name] for name in early)
    interference = min(decode, prefix) * INTERFERENCE_SHARE * _share(job) if overlapped else 0.0
    post = sum(compute[w.name] for w in windows if w.kind != "decode" and w.name not in early)
    beside = prefix / _share(job) if overlapped else prefix
    idle = max(0.0, decode + interference - beside) if overlapped else decode if job.disaggregated else 0.0
    window = dict(compute)
    if overlapped:
        window |= {name: compute[name] / _share(job) for name in early}
        window |= {"P1 decode": idle}
    free = idle + sampling if overlapped or job.disaggregated else 0.0
    return Timeline(compute, window, free, sampling + decode, prefix, beside, interference, post, sampling)


def _share(job: Job) -> float:
    """A fixed share slows both sides in proportion; under MPS default either may take all that is idle."""
    return job.sharing.share or 1.0


def _decode_s(job: Job) -> list[float]:
    """Seconds of every round of sampling."""
    weights = decoded_bytes(job)
    return [Costs(job).decode_s(weights, job.rollout_tp, prompts) for prompts in job.sampled_per_engine]


def _window_s(job: Job, window: Window, whole: bool) -> float:
    costs, work, prompts = Costs(job), role_work(job, window.role), job.prompts_of(window.role)
    match window.kind:
        case "prefix":
            return costs.prefix_s(work, job.prefixes_of(window.role))
        case "score":
            return costs.score_s(work, prompts, whole)
        case "train":
            return costs.train_s(work, prompts, whole)
        case _:
            return costs.adam_s(updated_parameters(job, window.role))
