"""The head of a plan page: whether it fits, and the job in three lines.

rollplex   grpo.py x qwen2_5_vl_32b_h800x8.yaml              FITS   peak 73.3 of 79.1 GiB  in  P1 decode
"""

from __future__ import annotations

from rich.text import Text

from rollplex.ir.job import Job
from rollplex.ir.plan import Plan
from rollplex.ir.planned_job import job_of
from rollplex.show.text import LABEL, WIDTH, clip, joined, labelled, line, under, unit_for

_RIGHT = 49  # where the right half of a line begins after the label, as in Job.describe


def header_lines(plan: Plan, job_name: str = "", width: int = WIDTH) -> list[Text]:
    """What cannot be executed (if anything), the verdict, and the job."""
    return [*_not_executable(plan, width), *_verdict(plan, job_name, width), *_job_lines(job_of(plan), width)]


def _not_executable(plan: Plan, width: int) -> list[Text]:
    if not plan.not_executable:
        return []
    return labelled("plan only", "no backend executes it yet: " + "; ".join(plan.not_executable), width, "yellow")


def _verdict(plan: Plan, job_name: str, width: int) -> list[Text]:
    """One line, or two when the names are long."""
    summary = plan.summary
    unit = unit_for([summary.capacity_bytes])
    word, style = ("FITS", "bold green") if plan.feasible else ("DOES NOT FIT", "bold red")
    amount = f"peak {unit(summary.peak_hbm_bytes, 1)} of {unit.named(summary.capacity_bytes, 1)}"
    peak = f"{amount}  in  {summary.peak_window}"
    title = f"{plan.algorithm.partition(':')[0]} x {job_name or job_of(plan).spec.name}"
    left = max(min(_RIGHT, width - LABEL - len(word) - 3 - len(peak)), len(title) + 2)
    head = (f"{'rollplex':<{LABEL}}", "bold")
    if LABEL + left + len(word) + 3 + len(peak) <= width:
        return [line(head, f"{title:<{left}}", (word, style), f"   {peak}")]
    title = clip(title, width - LABEL - len(word) - 3)
    return [line(head, title, "   ", (word, style)), *under(peak, width)]


def _job_lines(job: Job, width: int) -> list[Text]:
    """`Job.describe`, its labels in bold; what is too long for a line goes on in the next."""
    lines: list[Text] = []
    for text in job.describe().splitlines():
        label, body = text[:LABEL].strip(), text[LABEL:]
        parts = [body] if len(text) <= width else [p for p in _halves(body) if p]
        for i, part in enumerate(parts):
            lines += (
                labelled("" if i else label, part, width)
                if len(part) > width - LABEL
                else [line((f"{'' if i else label:<{LABEL}}", "bold"), part)]
            )
    return lines


def _halves(body: str) -> list[str]:
    """The left and the right half of a line of `Job.describe`, which two blanks separate."""
    left, _, right = body.partition("  ")
    return [left, " ".join(joined(right.split(), WIDTH, " "))]
