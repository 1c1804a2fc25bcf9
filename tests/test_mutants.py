"""Every place of compiled plans edited, one edit at a time: the checker refuses all of them but those that do no harm.

The plans are those of mutants/plans.py: every schedule, tail and engine, cut models, several trained roles.
A third of the kinds of edits is tried of each plan; `ROLLPLEX_MUTANTS=20` tries all, twenty places of each kind.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from mutants.everywhere import edits
from mutants.fields import Rows, note, page_rows, walk
from mutants.harmless import FREE, reason
from mutants.plans import PLANS, compiled, good

from rollplex.ir.checker import check_plan

MOST = int(os.environ.get("ROLLPLEX_MUTANTS", "0"))
COUNTS: Counter[str] = Counter()
ROWS: Rows = {}


@pytest.mark.parametrize("name", PLANS)
def test_no_harmful_edit_survives(name: str) -> None:
    survivors = []
    for edit, rules, why in walk(name, MOST):
        note(ROWS, edit, rules, why)
        COUNTS["refused" if rules else f"harmless: {why}"] += 1
        if not rules and not why:
            survivors.append(str(edit))
    assert not survivors, "\n".join(survivors)


def test_there_are_enough_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Five thousand at least; the harmless ones are counted by their reasons."""
    with capsys.disabled():
        print("\n" + "\n".join(f"  {count:6d} mutants {what}" for what, count in sorted(COUNTS.items())))
    assert COUNTS["refused"] >= 5_000


def test_the_reasons_are_not_for_everything() -> None:
    """A harmless edit is a small part of all: the table of reasons must not swallow what the checker should see."""
    plan = good("rollplex")
    every = edits(plan, MOST or 1, seed=0)
    assert sum(bool(reason(plan, e)) for e in every) < 0.25 * len(every)


def test_the_page_says_which_rule_sees_which_field() -> None:
    """What was found above stands in docs/plan.md: every field, one of its rules, every reason to pass."""
    told = page_rows()
    assert set(ROWS) <= set(told), f"python tools/fields.py: {sorted(set(ROWS) - set(told))}"
    for field, row in ROWS.items():
        assert row.passes <= told[field].passes, f"python tools/fields.py: {field} passes"
        assert not row.rules or row.rules.keys() & told[field].rules, f"python tools/fields.py: {field}"


def test_fields_that_are_free_are_free() -> None:
    """Every reason of the list of free fields lets some edit pass: the list holds nothing that is seen."""
    passing = {count.removeprefix("harmless: ") for count in COUNTS}
    assert set(FREE) <= passing, sorted(set(FREE) - passing)


def test_a_call_of_what_is_no_name_is_refused() -> None:
    """An argument of a record may be anything that JSON has, where a role's name belongs."""
    plan = compiled("rollplex")
    call = next(i for i, r in enumerate(plan.graph) if r.op == "rx.suffix")
    record = plan.graph[call]
    edited = record.model_copy(update={"args": ({"ref": "x"}, *record.args[1:]), "kwargs": {"head": "values"}})
    graph = (*plan.graph[:call], edited, *plan.graph[call + 1 :])
    assert check_plan(plan.model_copy(update={"graph": graph}))
