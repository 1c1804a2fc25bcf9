"""What `rollplex verify` says of a sound plan."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from rollplex.ir.plan import Plan
from rollplex.show.text import WIDTH, clip, line, unit_for


def checked_lines(plan: Plan, path: str, rules: int, width: int = WIDTH) -> list[Text]:
    """`ok: ..`, one line a fact; the last says so when the plan is sound but does not fit."""
    lines = [line(("ok: ", "bold green"), clip(fact, width - 4)) for fact in _facts(plan, path, rules)]
    if plan.infeasible:
        unit = unit_for([plan.summary.capacity_bytes])
        over = unit.named(plan.infeasible.shortfall_bytes, 1)
        lines.append(line(("DOES NOT FIT: ", "bold red"), f"{plan.infeasible.window} is {over} over capacity"))
    return lines


def _facts(plan: Plan, path: str, rules: int) -> Iterator[str]:
    summary = plan.summary
    unit = unit_for([summary.capacity_bytes])
    yield f"{path}: {plan.algorithm} under schedule {plan.schedule}"
    steps = ", ".join(f"{name} {len(steps)}" for name, steps in plan.programs.items())
    yield f"{len(plan.programs)} programs replayed, all {rules} rules hold (steps: {steps})"
    peak = f"peak {unit(summary.peak_hbm_bytes)} of {unit.named(summary.capacity_bytes)} in {summary.peak_window}"
    yield f"{len(summary.objects)} objects over {len(summary.windows)} windows, {peak}"
