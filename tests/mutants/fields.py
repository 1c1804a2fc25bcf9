"""Which rules refuse an edit of each field of a plan: good plans are walked, leaf by leaf, and edited.

summary.objects.*.bytes     refused by size, window-bytes, ..      summary.warnings     by nothing: text for people
An edit that means the same (a default spelled out, a job of the same keys) is no edit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutants.everywhere import Edit, edits
from mutants.harmless import reason
from mutants.plans import PLANS, good
from rollplex.ir.checker import check_plan
from rollplex.ir.errors import PlanError
from rollplex.ir.plan import Plan, parse_plan
from rollplex.ir.planned_job import job_of

THIRD = 3
FORM = "form"
"""What the schema of a plan file refuses, before any rule is asked."""


def refusals(plan: dict[str, Any], edit: Edit) -> frozenset[str] | None:
    """The rules that refuse an edited plan, none if it passes; None where the edit changes nothing."""
    try:
        made = parse_plan(edit.of(plan))
    except PlanError:
        return frozenset({FORM})
    found = frozenset(v.kind for v in check_plan(made))
    return None if not found and _same(parse_plan(plan), made) else found


def _same(a: Plan, b: Plan) -> bool:
    if a.model_copy(update={"job": {}}) != b.model_copy(update={"job": {}}):
        return False
    if a.job == b.job:
        return True
    try:
        return job_of(a) == job_of(b)
    except PlanError:
        return False


@dataclass
class Row:
    """One field: how often each rule refused an edit of it, and why other edits pass."""

    rules: Counter[str] = field(default_factory=Counter)
    passes: set[str] = field(default_factory=set)


def walk(name: str, most: int = 0) -> Iterator[tuple[Edit, frozenset[str], str]]:
    """Edits of a plan that change it, the rules that refuse each, and why it may pass where none does.

    So many of each kind; none says one of each kind, and of these every third: plans share most of their fields, and
    neighbours in the list begin at another.
    """
    plan = good(name)
    every = edits(plan, most or 1, seed=len(name))
    for edit in every if most else every[list(PLANS).index(name) % THIRD :: THIRD]:
        rules = refusals(plan, edit)
        if rules is not None:
            yield edit, rules, "" if rules else reason(plan, edit)


Rows = dict[str, Row]


def note(rows: Rows, edit: Edit, rules: frozenset[str], why: str) -> None:
    """One more edit of its field."""
    row = rows.setdefault(of_field(edit.pattern), Row())
    row.rules.update(rules)
    if not rules:
        row.passes.add(why)


def of_field(pattern: str) -> str:
    """A field without the names of processes, tasks and roles, and without what is inside a list or an argument.

    >>> of_field("programs.train.run:prefix.reads.*"), of_field("job.roles.*.train.zero")
    ('programs.*.run.reads', 'job.roles')
    """
    parts = re.sub(r":\w+", "", re.sub(r"^programs\.\w+", "programs.*", pattern)).split(".")
    return ".".join(parts[: DEPTHS.get(parts[0], 4)]).rstrip(".*")


DEPTHS = {"job": 2, "graph": 3, "losses": 3, "hosts": 1, "not_executable": 1}
SHOWN = 5
"""Rules of a field that the table names, those that refuse most edits first."""


def table(rows: Rows) -> Iterator[str]:
    """The rows as a table of a page."""
    yield "| field | refused by | passes |"
    yield "| --- | --- | --- |"
    for name, row in sorted(rows.items()):
        rules = sorted((-count, rule) for rule, count in row.rules.items())[:SHOWN]
        named = ", ".join(f"`{rule}`" for _, rule in rules) or "nothing"
        yield f"| `{name}` | {named} | {'; '.join(sorted(row.passes))} |"


PAGE = Path(__file__).resolve().parents[2] / "docs/plan.md"
BEGIN, END = "<!-- tools/fields.py -->\n", "<!-- end of tools/fields.py -->\n"


def page_rows() -> Rows:
    """The rows as docs/plan.md has them; how often a rule refused is not told there."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    found: Rows = {}
    for line in text.splitlines()[2:]:
        name, rules, passes = (part.strip() for part in line.strip("|").split("|"))
        found[name.strip("`")] = Row(Counter(re.findall(r"`([\w-]+)`", rules)), set(filter(None, passes.split("; "))))
    return found
