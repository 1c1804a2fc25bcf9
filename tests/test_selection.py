"""--passes: which passes run, and who needs what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex import api
from rollplex.ir.errors import PassError
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.module import Module
from rollplex.ir.stopwatch import Stopwatch, solving, stage
from rollplex.passes.assemble import NEEDS, build_plan
from rollplex.passes.candidates import Degrees
from rollplex.passes.pipeline import default_pipeline, start
from rollplex.passes.selection import check_needs, select

ROOT = Path(__file__).resolve().parent.parent
GRPO, JOB = str(ROOT / "examples/grpo.py"), ROOT / "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"
ALL = tuple(p.name for p in default_pipeline())


def chosen(text: str) -> tuple[str, ...]:
    return tuple(p.name for p in select(default_pipeline(), text))


def test_three_ways_to_say_it() -> None:
    """Nothing is all; a list is that list; `..` is up to; `-` is all but."""
    assert chosen("") == ALL
    assert chosen("layout, infer-types") == ("layout", "infer-types")
    assert chosen("..share-prefix") == ALL[:3]
    assert chosen("-layout,-estimate") == tuple(n for n in ALL if n not in ("layout", "estimate"))
    assert chosen("..schedule,-share-prefix") == ("infer-types", "prefix-split", "schedule")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-layuot", "--passes: no pass `layuot`\n    try: layout"),
        (
            "..residncy,x",
            "--passes: no pass `residncy`\n    try: residency\n--passes: no pass `x`\n    try: infer-types,",
        ),
        ("..layout,schedule", "--passes: `..layout` says where the pipeline ends: nothing but what is left out may"),
        ("layout,-layout", "--passes: no pass is left"),
    ],
)
def test_what_cannot_be_said(text: str, message: str) -> None:
    """Every name that is none, with the nearest that is."""
    with pytest.raises(PassError) as error:
        chosen(text)
    assert str(error.value).startswith(message)


def test_what_a_later_pass_needs_cannot_be_left_out() -> None:
    """Each pass that goes without is named, with the fact and who makes it; so is the plan itself."""
    with pytest.raises(PassError) as error:
        api.compile_files(GRPO, JOB, passes="-residency")
    assert [p.what for p in error.value.problems] == [
        f"{who} needs Residency, which `residency` makes"
        for who in ("`chunk-sizes`", "`host-pool`", "`estimate`", "`lower`", "the plan")
    ]
    with pytest.raises(PassError, match="the plan needs Programs, which `lower` makes\n    try: run `lower` before"):
        api.compile_files(GRPO, JOB, passes="-lower")


def test_an_order_that_cannot_be() -> None:
    """A maker that runs later does not count."""
    with pytest.raises(PassError, match="`lifetimes` needs Layout, which `layout` makes"):
        api.run_passes(GRPO, JOB, passes="infer-types,prefix-split,schedule,lifetimes,layout")


def test_passes_say_all_that_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`needs` has every fact that a pass, or the plan, really looks up."""
    read: set[type] = set()
    lookup = Module.__getitem__
    monkeypatch.setattr(Module, "__getitem__", lambda self, fact: read.add(fact) or lookup(self, fact))
    module = start(load_algorithm(GRPO), load_job(JOB))
    for p in default_pipeline():
        read.clear()
        module = p.run(module)
        assert read <= set(p.needs), p.name
    read.clear()
    build_plan(module)
    assert read - {Degrees} <= set(NEEDS)  # what was chosen before the passes ran
    check_needs(default_pipeline(), default_pipeline(), NEEDS)


def test_a_stopwatch_adds_up() -> None:
    """Stages in order, what is inside one is its own, and a solver's seconds are part of it; outside nothing counts."""
    with stage("before"):
        solving(9.0)
    with Stopwatch() as watch:
        with stage("a"):
            with stage("inner"):
                solving(0.25)
            solving(0.5)
        with stage("b"):
            pass
    with stage("after"):
        pass
    assert [(s.name, s.solver_s) for s in watch.stages] == [("a", 0.75), ("b", 0.0)]
