"""Explicit imports: the snapshot is released at the optimizer barrier, as in paper section 3.2, and mapped again.

rollout   generate  unmap (imported) | ..                                               wait | map (imported) | signal
train                                | .. theta-quiet | drop  map  chunk 0 1 2  export | signal                    wait
q = 2     unmap (imported) | theta-quiet | drop  map  chunk 0 1 2  export | map (imported) | exchange write
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mutants.edit import insert, place, put, steps
from tinyplan import tiny_plan

from rollplex.ir.check.imports import bindings
from rollplex.ir.check.rules import At
from rollplex.ir.checker import check_plan
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Drop, Exchange, Export, Map, Publish, Run, Signal, Unmap, UpdateChunk, Wait

SNAPSHOT, END = "actor.snapshot", "P3 publish"


def where(plan: Plan, process: str, kind: type, name: str = "") -> int:
    """The first step of a class in a program, of an object if one is named."""
    return next(i for _, i, s in steps(plan, kind, process=process) if getattr(s, "object", "") in (name, ""))


def released() -> Plan:
    """The plan of the drawing."""
    plan = tiny_plan()
    generate = where(plan, "rollout", Run)
    window = plan.programs["rollout"][generate].window
    plan = insert(plan, "rollout", generate + 1, Unmap(window=window, object=SNAPSHOT, imported=True))
    taken = Wait(window=END, event="there"), Map(window=END, object=SNAPSHOT, imported=True)
    plan = insert(plan, "rollout", place(plan, "rollout", "published"), *taken, Signal(window=END, event="taken"))
    chunk = where(plan, "train", UpdateChunk)
    remap = Drop(window="P3 update", object=SNAPSHOT), Map(window="P3 update", object=SNAPSHOT)
    plan = insert(plan, "train", chunk, *remap)
    plan = insert(plan, "train", where(plan, "train", Publish, SNAPSHOT), Wait(window=END, event="taken"))
    peers = Map(window=END, object=SNAPSHOT, imported=True)
    handed = Export(window=END, object=SNAPSHOT), Signal(window=END, event="there"), peers
    plan = insert(plan, "train", where(plan, "train", Exchange, SNAPSHOT), *handed)
    quiet = place(plan, "train", "theta-quiet")
    at = plan.programs["train"][quiet].window
    return insert(plan, "train", quiet, Unmap(window=at, object=SNAPSHOT, imported=True))


def import_step(plan: Plan, kind: type) -> int:
    return next(i for _, i, s in steps(plan, kind, process="rollout") if getattr(s, "imported", False))


def test_pages_may_be_released_while_nobody_imports_them() -> None:
    assert check_plan(released()) == ()


def faults() -> Iterator[tuple[str, str, Plan]]:
    plan = released()
    enter, leave = import_step(plan, Map), import_step(plan, Unmap)
    window = plan.programs["rollout"][leave].window
    let_go, taken = (plan.programs["rollout"][i] for i in (leave, enter))
    yield "imported for the whole run", "imported-pages", put(put(plan, "rollout", enter), "rollout", leave)
    yield "never let go", "not-imported", put(plan, "rollout", leave)
    yield "never let go: the next iteration imports again", "end-state", put(plan, "rollout", leave)
    yield "let go and never bound again", "end-state", put(plan, "rollout", enter)
    yield (
        "bound again before it is let go",
        "import-start",
        put(put(plan, "rollout", enter, let_go), "rollout", leave, taken),
    )
    yield "let go twice", "not-held", put(plan, "rollout", leave, let_go, let_go)
    yield "let go before the read", "not-imported", insert(put(plan, "rollout", leave), "rollout", leave - 1, let_go)
    yield "imported twice", "double-map", put(plan, "rollout", enter, taken, taken)
    yield "imported again too early", "imported-pages", insert(put(plan, "rollout", enter), "rollout", leave + 1, taken)
    yield (
        "imported before it is handed out",
        "handed-out",
        insert(put(plan, "rollout", enter), "rollout", enter - 1, taken),
    )
    yield "never handed out", "handed-out", put(plan, "train", where(plan, "train", Export, SNAPSHOT))
    early = insert(plan, "train", 0, Drop(window=window, object=SNAPSHOT), Map(window=window, object=SNAPSHOT))
    yield "remapped while rollout decodes", "imported-pages", early
    unmapped = where(plan, "train", Map, SNAPSHOT)
    yield "never mapped again", "dropped-needed", put(plan, "train", unmapped)


@pytest.mark.parametrize(("kind", "plan"), [(k, p) for _, k, p in faults()], ids=[name for name, _, _ in faults()])
def test_a_fault_with_imports_is_refused(kind: str, plan: Plan) -> None:
    assert kind in {v.kind for v in check_plan(plan)}


def test_contents_must_be_there_when_a_reader_uses_them() -> None:
    """The owner maps the snapshot again and fills it only in P3: rollout would read pages that hold nothing."""
    plan = released()
    drop = where(plan, "train", Drop, SNAPSHOT)
    pair = plan.programs["train"][drop : drop + 2]
    first = plan.programs["train"][0].window
    early = [s.model_copy(update={"window": first}) for s in pair]
    plan = put(put(plan, "train", drop), "train", drop)
    plan = insert(insert(plan, "train", 0, *early), "train", 2, Signal(window=first, event="remapped"))
    wait = next(s for _, _, s in steps(plan, process="rollout") if s.kind == "wait")
    plan = insert(plan, "rollout", 0, wait.model_copy(update={"event": "remapped"}))
    found = {v.kind for v in check_plan(plan) if v.at and v.at.process == "rollout"}
    assert found == {"not-produced"}


def test_an_iteration_cannot_begin_unbound() -> None:
    """map | unmap: `run` binds imports before the first iteration, and would find the pages mapped."""
    window = "P1 decode"
    back, away = (kind(window=window, object=SNAPSHOT, imported=True) for kind in (Map, Unmap))
    _, wrong = bindings([At("rollout", 3, back), At("rollout", 7, away)])
    assert [v.kind for v in wrong] == ["import-start"]
    assert str(wrong[0]) == (
        "rollout step 3 (map actor.snapshot (imported)) in P1 decode: "
        "actor.snapshot is imported since before the iteration\n"
        "    rule import-start: what a process imports has pages when an iteration starts, and is bound (design 6)\n"
        "    try: let the reader unmap it before it maps it again"
    )


def test_bindings() -> None:
    """unmap | map: bound at both ends of the iteration, free in between."""
    window = "P1 decode"
    away, back = (kind(window=window, object=SNAPSHOT, imported=True) for kind in (Unmap, Map))
    found, wrong = bindings([At("rollout", 3, away), At("rollout", 7, back)])
    assert wrong == []
    assert [b.holds(At("rollout", i, away)) for b in found for i in (0, 5, 9)] == [
        True,
        False,
        False,
        False,
        False,
        True,
    ]
