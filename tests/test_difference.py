"""`rollplex diff`: what differs, with its sign, and nothing of what is equal."""

from __future__ import annotations

import pageplan
from pageplan import GIB, OBJECTS, planned
from test_planpage import OVER

from rollplex.ir.plan import Plan
from rollplex.show.difference import difference_lines


def rows(old: Plan, new: Plan) -> list[list[str]]:
    return [t.plain.split() for t in difference_lines(old, new)]


def test_equal_plans_say_nothing() -> None:
    """No line at all."""
    assert difference_lines(pageplan.plan(), pageplan.plan()) == []


def test_a_key_of_the_job() -> None:
    """Old and new value under the key as a user writes it."""
    job = {**pageplan.JOB, "workload": {**pageplan.JOB["workload"], "prompts": 32}}
    assert rows(pageplan.plan(), pageplan.plan(job=job)) == [["job", "workload.prompts", "16", "32"]]


def test_verdict_peak_and_windows() -> None:
    """A smaller capacity: the verdict and the capacity differ; bytes do not, and are not told."""
    found = rows(pageplan.plan(), pageplan.plan(pageplan.summary(capacity=7 * GIB), OVER))
    assert ["verdict", "fits", "true", "false"] in found
    assert ["capacity", "10.00", "GiB", "7.00", "GiB", "-3.00", "GiB"] in found
    assert not any("P1" in row for row in found)


def test_objects_added_removed_resized_moved() -> None:
    """Each with its own line; an object in one plan alone has no other side."""
    changed = (
        planned("actor.snapshot", 5, "hhhh", "0123", **{"class": "regenerable"}),
        planned("reference.weights", 2, "hhss", "0", host_backed=True, **{"class": "regenerable"}),
        *OBJECTS[3:],
        planned("extra", 1, "h---"),
    )
    found = rows(pageplan.plan(), pageplan.plan(pageplan.summary(changed)))
    assert ["objects", "actor.snapshot", "4.00", "GiB", "5.00", "GiB", "+1.00", "GiB"] in found
    assert ["actor.boundary", "1.00", "GiB", "-"] in found
    assert ["extra", "-", "1.00", "GiB"] in found
    assert ["moved", "reference.weights", "in", "P1", "decode", "host", "hbm"] in found
    assert max(len(t.plain) for t in difference_lines(pageplan.plan(), pageplan.plan(pageplan.summary(changed)))) <= 100
