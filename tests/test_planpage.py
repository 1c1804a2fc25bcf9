"""The plan page: what stands where, and that nothing ever runs over the line."""

from __future__ import annotations

import golden
import pageplan
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pageplan import GIB, OBJECTS, WINDOWS, planned

from rollplex.ir.errors import PlanError
from rollplex.ir.plan import Infeasible, NodeRecord, ObjectBytes, Plan, Remedy
from rollplex.show.expressions import Records
from rollplex.show.memory import bar
from rollplex.show.page import plan_head, plan_page
from rollplex.show.text import joined, seconds, size, unit_for

OVER = Infeasible(
    window=WINDOWS[2],
    shortfall_bytes=GIB,
    objects=(ObjectBytes(name="actor.snapshot", bytes=4 * GIB), ObjectBytes(name="actor.boundary", bytes=GIB)),
    remedies=(Remedy(change="schedule=serial", frees_bytes=2 * GIB, costs_s=12.5),),
)


def text_of(plan: Plan, job_name: str = "", width: int = 100) -> str:
    return "\n".join(t.plain for t in plan_page(plan, job_name, width)) + "\n"


def test_golden_of_a_feasible_page() -> None:
    """Every section of a page, as a person reads it."""
    golden.check("plan_page.txt", text_of(pageplan.plan(), "tiny.yaml"))


def test_golden_of_an_infeasible_page() -> None:
    """A page that says why it does not fit, what would fit, and that no backend runs it."""
    plan = pageplan.plan(pageplan.summary(capacity=7 * GIB), OVER, not_executable=("engine vllm", "8 GPUs"))
    golden.check("plan_page_infeasible.txt", text_of(plan, "tiny.yaml"))


def test_what_else_is_exceeded_is_told_beside_the_first() -> None:
    """A reader who makes room in HBM learns at once that the node's memory lacks too."""
    summary = pageplan.summary(capacity=7 * GIB)
    node = summary.node.model_copy(update={"capacity_bytes": 20 * GIB})
    text = text_of(pageplan.plan(summary.model_copy(update={"node": node}), OVER))
    assert f"are live, the host memory of a node is {size(20 * GIB, 1)}" in text
    assert "also " not in text_of(pageplan.plan(summary, OVER))


def test_a_page_comes_from_the_file_alone() -> None:
    """A plan that went through JSON prints the same page: nothing is kept beside it."""
    plan = pageplan.plan()
    again = Plan.model_validate_json(plan.to_json())
    assert text_of(again) == text_of(plan)


def test_what_cannot_run_stands_on_the_first_line() -> None:
    """A reader of a plan that no backend executes learns it before anything else."""
    plan = pageplan.plan(not_executable=("engine vllm",))
    assert text_of(plan).splitlines()[0] == "plan only  no backend executes it yet: engine vllm"
    assert text_of(pageplan.plan()).startswith("rollplex")


def test_the_head_alone_says_why() -> None:
    """`compile -o` prints the verdict and the reason, without the tables."""
    plan = pageplan.plan(pageplan.summary(capacity=7 * GIB), OVER)
    head = "\n".join(t.plain for t in plan_head(plan))
    assert "DOES NOT FIT   peak 8.0 of 7.0 GiB  in  P2 train" in head
    assert "in P2 train 8.0 GiB are live, a GPU has 7.0 GiB: 1.0 GiB over" in head
    assert "schedule=serial   frees 2.0 GiB   step +12.5 s" in head
    assert "state contract" not in head


def test_overrides_are_never_cut() -> None:
    """Short ones stand beside their figures, long ones above them; every one can be pasted as it is printed."""
    for change in ("schedule=serial", "workload.prompts=42 roles.actor.rollout.kv_cache_gib=33.16"):
        remedy = Remedy(change=change, frees_bytes=14 * GIB, costs_s=-35.8, costs_share=0.116)
        plan = pageplan.plan(pageplan.summary(capacity=7 * GIB), OVER.model_copy(update={"remedies": (remedy,)}))
        head = [t.plain for t in plan_head(plan)]
        assert set(change.split()) <= {word for text in head for word in text.split()}
        assert any("step -35.8 s" in text and "a prompt +11.6 %" in text for text in head)


def test_cells_say_where_and_what_for() -> None:
    """hbm, host, drop or nothing; * where an object is used, + where it is made, a when it is attached."""
    objects = (*OBJECTS, planned("saved", 1, "hd-s", "3", WINDOWS[0]))
    lines = text_of(pageplan.plan(pageplan.summary(objects))).splitlines()
    rows = {text.split("  ")[1]: text for text in lines if text.startswith("  ") and "phase-local" in text}
    assert rows["saved"].split() == ["saved", "1.00", "phase-local", "hbm+", "drop", "-", "host*"]
    boundary = next(text for text in lines if text.startswith("  actor boundary"))
    assert boundary.split() == ["actor", "boundary", "1.00", "boundary", "a", "hbm+", "hbm", "hbm*", "-"]


def test_naive_has_the_papers_table() -> None:
    """Under schedule naive the objects stand by role and engine, boundaries as one row, and add up."""
    own = [
        planned(f"actor.{n}", g, "hhhh", title=f"actor {t}")
        for n, g, t in (("w", 7, "BF16 weights"), ("g", 15, "FP32 gradients"))
    ]
    kv = [planned(f"{r}.boundary", 8, "hhhh", **{"class": "boundary"}) for r in ("actor", "reference")]
    tower = planned("rollout.vision", 1, "hhhh", title="rollout vision tower", process="rollout", role="actor")
    plan = pageplan.plan(pageplan.summary([*own, *kv, tower], capacity=10 * GIB), OVER, schedule="naive")
    found = text_of(plan)
    table = found[found.index("naive overlap") :].split("\n\n")[0].splitlines()[1:]
    assert [" ".join(row.split()) for row in table] == [
        "actor, training TP=4 BF16 weights 7.00",
        "FP32 gradients 15.00",
        "preserved prefix KV, 2 roles 16.00",
        "rollout TP=2 vision tower 1.00",
        "total 39.00",
        "without towers (the paper leaves them out) 38.00",
    ]


def test_a_foreign_job_is_refused() -> None:
    """A plan whose job is none says which key is wrong."""
    with pytest.raises(PlanError, match=r"job\.workload\.prompts"):
        text_of(pageplan.plan(job={**pageplan.JOB, "workload": {**pageplan.JOB["workload"], "prompts": "many"}}))


# ---- figures


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1, "1 B"), (2048, "2.00 KiB"), (48 * 2**20, "48.00 MiB"), (79.1 * GIB, "79.10 GiB")],
)
def test_sizes_in_the_unit_that_fits(nbytes: float, text: str) -> None:
    """GiB for a big job, MiB and KiB for a tiny one."""
    assert size(nbytes) == text


def test_something_small_is_not_nothing() -> None:
    """A page of GiB never rounds an object that exists to zero."""
    assert unit_for([30 * GIB])(1000) == "<.01"
    assert unit_for([30 * GIB])(0) == "0.00"


@pytest.mark.parametrize(
    ("value", "text"), [(163.2, "163 s"), (61.04, "61.0 s"), (0.357, "0.36 s"), (0.0489, "48.9 ms"), (0, "0 s")]
)
def test_seconds_with_the_figures_they_deserve(value: float, text: str) -> None:
    """A prediction of minutes has no hundredths."""
    assert seconds(value) == text


@example(held=27, capacity=27, peak=28, room=8)
@given(held=st.integers(0, 200), capacity=st.integers(1, 200), peak=st.integers(0, 200), room=st.integers(8, 90))
def test_bars_keep_their_length_and_cross_the_mark_only_when_over(
    held: int, capacity: int, peak: int, room: int
) -> None:
    """####....|  and  ####|!!!: equally long, ! exactly when a window is over capacity."""
    made = "".join(text for text, _ in bar(held, capacity, max(peak, held), room))
    assert len(made) == room
    assert made.count("|") == 1
    assert ("!" in made) == (held > capacity)


@given(st.lists(st.text("abc", min_size=1, max_size=30)), st.integers(4, 40))
def test_joined_keeps_every_part_in_order(parts: list[str], width: int) -> None:
    """Wrapping a list breaks between parts only."""
    lines = joined(parts, width, " | ")
    assert all(len(text) <= width for text in lines)
    assert [p for text in lines for p in text.split(" | ")] == [
        p if len(p) <= width else p[: width - 1] + "." for p in parts
    ]


# ---- the graph


def records(*lines: tuple) -> Records:
    return Records([NodeRecord(name=n, op=op, args=args, loc=f"a.py:{line}") for n, op, args, line in lines])


def test_temporaries_stand_where_they_are_read() -> None:
    """What only its own line reads is part of the line; brackets as Python needs them."""
    graph = records(
        ("x", "input", (), 1),
        ("add", "operator.add", ({"ref": "x"}, 1), 2),
        ("y", "operator.mul", ({"ref": "add"}, {"ref": "x"}), 2),
        ("neg", "operator.neg", ({"ref": "y"},), 3),
        ("z", "operator.pow", ({"ref": "neg"}, -2), 3),
        ("sub", "operator.sub", ({"ref": "z"}, {"ref": "y"}), 4),
        ("w", "operator.sub", ({"ref": "y"}, {"ref": "sub"}), 4),
    )
    assert {r.name: graph.text(r) for r in graph.statements()} == {
        "y": "(%x + 1) * %x",
        "z": "(-%y) ** -2",
        "w": "%y - (%z - %y)",
    }


def test_dtypes_slices_and_infinities_as_they_were_written() -> None:
    """Arguments that JSON cannot say come back as Python."""
    graph = records(
        ("x", "input", (), 1),
        ("a", "Tensor.to", ({"ref": "x"}, {"dtype": "float32"}), 2),
        ("b", "operator.getitem", ({"ref": "a"}, [{"ellipsis": True}, {"slice": [None, -1, None]}]), 3),
        ("c", "torch.clamp", ({"ref": "b"}, {"float": "-inf"}, [1, 2]), 4),
    )
    assert [graph.text(r) for r in graph.statements()] == [
        "%x.to(torch.float32)",
        "%a[..., :-1]",
        'torch.clamp(%b, float("-inf"), (1, 2))',
    ]


# ---- properties

titles = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=60)
words = st.text("abcdefghij", min_size=1, max_size=12)


@st.composite
def any_plans(draw: st.DrawFn) -> Plan:
    """Plans with up to 15 windows and 12 objects of any size and name, fitting or not."""
    names = draw(
        st.lists(st.tuples(st.sampled_from(["P1", "P2", "P3"]), words, words), min_size=1, max_size=15, unique=True)
    )
    windows = sorted(f"{phase} {work}-{role}" for phase, work, role in names)
    made = draw(st.lists(titles, min_size=1, max_size=12))
    objects = []
    for i, title in enumerate(made):
        places = {w: draw(st.sampled_from(["hbm", "host", "dropped", "-"])) for w in windows}
        used = tuple(w for w in windows if draw(st.booleans()))
        one = planned(f"o{i}", 1, "hhhh", title=title, residency=places, consumed=used)
        objects.append(one.model_copy(update={"bytes": draw(st.integers(0, 2**50)), "attached": draw(st.booleans())}))
    found = pageplan.summary(objects, windows, draw(st.integers(1, 2**45)))
    return pageplan.plan(
        found, draw(st.sampled_from([None, OVER])), schedule=draw(st.sampled_from(["naive", "serial"]))
    )


@settings(max_examples=150, deadline=None)
@given(any_plans(), st.sampled_from([100, 120]))
def test_no_line_is_too_long_and_nothing_is_left_out(plan: Plan, width: int) -> None:
    """Whatever a plan holds, lines stay within the page, every window has a bar, every object a line a block."""
    lines = [t.plain for t in plan_page(plan, "job.yaml", width)]
    assert max(map(len, lines)) <= width
    bars = [text for text in lines if "|" in text and (" s" in text or " ms" in text)]
    for w in plan.summary.windows:
        assert any(text.strip().startswith(w.name[:20]) for text in bars)
    contract = lines[next(i for i, t in enumerate(lines) if t.startswith("state contract")) :]
    for o in plan.summary.objects:
        assert any(text.startswith(f"  {o.title[:20]}") for text in contract)
