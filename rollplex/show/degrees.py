"""The degrees that a job left to the compiler: what was chosen, the best of the others, and how to pin the choice.

degrees    actor train TP8, rollout TP4: the best of 16 legal choices, 6 fit; 4 refused uncompiled
next       actor train TP8, rollout TP8   step 171 s   peak 69.3 GiB
to pin it  roles.actor.train.tensor_parallel=8 roles.actor.rollout.tensor_parallel=4
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from rollplex.ir.plan import Candidate, Plan
from rollplex.show.text import LABEL, WIDTH, clip, joined, labelled, line, seconds, size, table

SHORT = {"tensor_parallel": "TP", "pipeline_parallel": "PP", "context_parallel": "CP", "expert_parallel": "EP"}
SHOWN = 4


def degree_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """Empty for a job that states its degrees."""
    chosen, others = plan.summary.degrees, plan.summary.runners_up
    if not chosen:
        return []
    lines = labelled("degrees", f"{spelled(chosen)}: {_of_how_many(plan)}", width)
    rows = table([_row(c) for c in others[:SHOWN]], gap=3) if others else []
    lines += [line((f"{'' if i else 'next':<{LABEL}}", "bold"), clip(r, width - LABEL)) for i, r in enumerate(rows)]
    pins = joined([f"{key}={value}" for key, value in chosen.items()], width - LABEL, " ")
    return lines + [line((f"{'' if i else 'to pin it':<{LABEL}}", "bold"), p) for i, p in enumerate(pins)]


def spelled(degrees: Mapping[str, int]) -> str:
    """`actor train TP8, rollout TP4; reference score TP8`: roles and engines are named once."""
    text, before = "", ("", "")
    for key, value in degrees.items():
        _, role, engine, degree = key.split(".")
        between = "" if not text else "; " if role != before[0] else ", " if engine != before[1] else " "
        name = f"{role} {engine} " if role != before[0] else f"{engine} " if engine != before[1] else ""
        text, before = f"{text}{between}{name}{SHORT[degree]}{value}", (role, engine)
    return text


def _of_how_many(plan: Plan) -> str:
    others = plan.summary.runners_up
    if not others:
        return "the only legal choice"
    fit, unseen = sum(c.feasible for c in others) + plan.feasible, sum(not c.compiled for c in others)
    told = f"the best of {len(others) + 1} legal choices, {fit} fit"
    if not plan.feasible:
        told = f"none of {len(others) + 1} legal choices fits, this one lacks least"
    return told + (f"; {unseen} refused uncompiled" if unseen else "")


def _row(c: Candidate) -> tuple[str, str, str]:
    step = f"step {seconds(c.step_s)}" if c.step_s is not None else ""
    return spelled(c.degrees), step, f"peak {size(c.peak_bytes, 1)}" if c.feasible else c.why_not
