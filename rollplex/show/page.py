"""The plan page, made of a plan alone: what `--plan-only` prints.

for text in plan_page(read_plan("plan.json")): print(text.plain)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from rollplex.ir.plan import Plan
from rollplex.show.contract import contract_lines
from rollplex.show.degrees import degree_lines
from rollplex.show.figures import (
    chunk_lines,
    layout_lines,
    solver_lines,
    time_lines,
    turn_lines,
    warning_lines,
)
from rollplex.show.graph import graph_lines
from rollplex.show.header import header_lines
from rollplex.show.memory import memory_lines
from rollplex.show.sharing import policy_lines
from rollplex.show.text import WIDTH
from rollplex.show.verdict import infeasible_lines, naive_lines

Section = Callable[[Plan, int], Sequence[Text]]

# Sections that a blank line sets apart; those within a group stand together.
_GROUPS: tuple[tuple[Section, ...], ...] = (
    (infeasible_lines,),
    (degree_lines,),
    (naive_lines,),
    (graph_lines,),
    (contract_lines,),
    (memory_lines,),
    (layout_lines, chunk_lines, solver_lines, time_lines, turn_lines, policy_lines, warning_lines),
)


def plan_head(plan: Plan, job_name: str = "", width: int = WIDTH) -> list[Text]:
    """The verdict and the job, and why it does not fit when it does not."""
    why = infeasible_lines(plan, width)
    return [*header_lines(plan, job_name, width), *([Text(""), *why] if why else [])]


def plan_page(plan: Plan, job_name: str = "", width: int = WIDTH) -> list[Text]:
    """Lines of at most `width` columns; `job_name` is the job file's name, which a plan does not keep."""
    lines = header_lines(plan, job_name, width)
    for sections in _GROUPS:
        group = [text for section in sections for text in section(plan, width)]
        lines += [Text(""), *group] if group else []
    return lines
