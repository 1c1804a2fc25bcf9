"""Predicted seconds of the iteration, and how much the overlap can save at most (paper section 3.1, equation 1).

decode 88.4 s  prefix 16.9 s  post 72.9 s  step 163.0 s  serial 179.2 s  1.10x

T_D decode (behind the engine's own prefill, and with what it takes to read weights in a shared layout), T_P prefix, d_D
decode's slowdown beside the prefixes, T_post all after the rollout, publication included: the serial step takes
T_D + T_P + T_post, and overlap saves min(T_P - d_D, T_D) of it at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from rollplex.ir.errors import GraphError
from rollplex.ir.group_checks import group_rules
from rollplex.ir.module import Module
from rollplex.ir.plan import Times
from rollplex.ir.planned_turns import TurnTimes
from rollplex.ir.streamed_checks import streamed_rules
from rollplex.passes.chunk_sizes import Chunks
from rollplex.passes.layout import Layout, layout_of
from rollplex.passes.leaving import leaving
from rollplex.passes.residency import Residency
from rollplex.passes.schedule import Schedule, SchedulePass
from rollplex.passes.state import Lifetimes
from rollplex.passes.timeline import Added, Timeline, window_seconds


@dataclass(frozen=True)
class Estimate:
    """Times of the iteration, and of each window; the windows add up to the step."""

    made_by: ClassVar[str] = "estimate"
    times: Times
    window_s: dict[str, float]

    def __str__(self) -> str:
        t = self.times
        return (
            f"decode {t.decode_s:.1f} s  prefix {t.prefix_s:.1f} s  post {t.post_s:.1f} s  step {t.step_s:.1f} s"
            f"  serial {t.serial_s:.1f} s  {t.speedup_vs_serial:.2f}x"
        )


def colocated_s(module: Module) -> float:
    """The same phases, one after the other, with every engine on all GPUs: what two pools are to be compared with."""
    job, schedule = module.job, module[Schedule]
    cluster = job.cluster.model_copy(update={"rollout_gpus": None})
    together = job.model_copy(update={"schedule": "serial", "cluster": cluster})
    line = window_seconds(together, schedule, Added.of(together, layout_of(together).summary), step_of(module))
    return line.decode_s + line.prefix_s + line.post_s + job.workload.environment_s


def streamed_s(module: Module, exposed: float) -> float | None:
    """What a step of schedule `rollplex` would take if groups were trained on as they complete; None if none may be."""
    other = module.job.model_copy(update={"schedule": "streamed"})
    rules = (*streamed_rules(other), *group_rules(other))
    if module.job.schedule != "rollplex" or rules:
        return None
    try:
        schedule = SchedulePass().run(replace(module, job=other))[Schedule]
    except GraphError:
        return None
    line = window_seconds(other, schedule, Added.of(other, module[Layout].summary), step_of(module))
    return round(sum(t.last_s for t in line.turns) + line.post_s - line.hidden_post_s + exposed, 6)


def step_of(module: Module) -> int:
    """Responses that a suffix step takes."""
    return module[Chunks].summary.microbatch.suffix_responses


def hidden_offload_s(module: Module) -> float:
    """What gradients that leave beside their backward take off the step."""
    pieces, objects = module[Residency].in_pieces, module[Lifetimes].objects
    found = (leaving(module.job, o.role, o.nbytes) for o in objects if o.name in pieces)
    return sum(way.hidden_s for way in found if way)


def _turn_times(line: Timeline) -> tuple[TurnTimes, ...]:
    """Turn by turn, where there are several."""
    found = tuple(
        TurnTimes(
            decode_s=round(t.decode_s, 6), prefix_s=round(t.prefix_s, 6), interference_s=round(t.interference_s, 6)
        )
        for t in line.turns
    )
    return found if len(found) > 1 else ()


@dataclass(frozen=True)
class EstimatePass:
    """Evaluate equation 1: T = max(T_D + d_D, T_P) + T_post, plus the transfers that stay exposed.

    Under `streamed` less the part of T_post that is done before decode ends (stream_times.py).

    Rounds of dynamic sampling before the last come before it: no prefix runs beside them. Of several turns each has its
    own max(T_D + d_D, T_P), and between them the environment runs by itself.

    Job keys: `cluster`, `model`, `roles`, `workload`, `sharing`.
    """

    name: ClassVar[str] = "estimate"
    needs: ClassVar[tuple[type, ...]] = (Schedule, Layout, Lifetimes, Residency, Chunks)
    makes: ClassVar[type] = Estimate

    def run(self, module: Module) -> Module:
        """Compute the times from the timeline and the residency solution."""
        schedule, residency = module[Schedule], module[Residency]
        exposed = residency.exposed_s
        line = window_seconds(module.job, schedule, Added.of(module.job, module[Layout].summary), step_of(module))
        # One after the other it is known which prompts complete before their prefixes run.
        known = module.job.workload.prompts / module.job.sampled if schedule.overlapped else 1.0
        rest = line.environment_s + line.post_s + exposed
        after_another = line.decode_s + known * line.prefix_s + rest
        overlapped = line.sampling_s + sum(t.last_s for t in line.turns) + rest - line.hidden_post_s
        step = overlapped if schedule.overlapped else after_another
        serial = colocated_s(module) + exposed if module.job.disaggregated else after_another
        times = Times(
            decode_s=round(line.decode_s, 6),
            prefix_s=round(line.prefix_s, 6),
            interference_s=round(line.interference_s, 6),
            post_s=round(line.post_s, 6),
            exposed_transfer_s=round(exposed, 6),
            serial_s=round(serial, 6),
            step_s=round(step, 6),
            speedup_vs_serial=round(round(serial, 6) / round(step, 6), 4),  # of the times that the plan tells
            saving_bound_s=round(sum(t.saving_bound_s for t in line.turns), 6),
            environment_s=round(line.environment_s, 6),
            hidden_post_s=round(line.hidden_post_s, 6),
            hidden_offload_s=round(hidden_offload_s(module), 6),
            streamed_s=streamed_s(module, exposed),
            turns=_turn_times(line),
        )
        window_s = {w: s + residency.exposed.get(w, 0.0) for w, s in line.window.items()}
        return module.put(Estimate(times, window_s))
