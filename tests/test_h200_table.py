"""The table of an H200: its formulas on steps that are known, its page from a run of a host, its parts on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_tiny import megatron_plan
from runtime_tiny import luck, tiny_plan

from benchmarks.h200 import table
from benchmarks.h200.ran import Ran, Repeats, read
from benchmarks.h200.table import Found, page, summary
from benchmarks.optimizer_gpu import Stream
from benchmarks.publication_gpu import Published, measure
from rollplex.ir.plan import Plan
from rollplex.runtime.run import run_plan

GIB = 2**30


def step(step_s: float, decode: float, prefix: float, hidden: float, publish: float = 0.004) -> dict[str, Any]:
    overlap = {"decode_s": decode, "prefix_s": prefix, "hidden_s": hidden, "post_s": 2.5, "post_hidden_s": 0.0}
    return {"step_s": step_s, "overlap": overlap, "windows": {"P3 publish": publish}}


def ran(name: str, steps: list[dict[str, Any]], **changes: Any) -> Ran:
    """A run of a plan whose bytes are in no figure here."""
    plan = changes.pop("plan", None) or megatron_plan(1)
    memory = [{"window": "w", "planned": 100, "measured": 97}, {"window": "v", "planned": 100, "measured": 100}]
    report = {"steps": steps, "metrics": [{"logprob_gap": 0.02}], "memory": memory, "memory_as_planned": True}
    report |= {"stages": [{"phase": "start", "process": "train 0", "stage": "taking memory", "seconds": 1.25}]}
    made = {"slices": (("w", 10**10, 2 * 10**10),), "before": 0, "within": lambda start, stop: [1], "seconds": 60.0}
    return Ran(name, plan, report, **{**made, **changes})


SERIAL = ran("serial", [step(99, 99, 99, 0), step(6.0, 3.0, 0.6, 0.0), step(7.0, 3.2, 0.8, 0.0)])


def test_the_first_step_is_no_repeat_unless_it_is_alone() -> None:
    assert SERIAL.step == Repeats((6.0, 7.0))
    assert str(SERIAL.step) == "6.50 (6.00..7.00)"
    assert ran("one", [step(9, 1, 1, 1)]).step.mean == 9


def test_what_is_gained_is_what_is_not_waited_for() -> None:
    """
    serial     decode 3.1, then prefixes 0.7                                 T_D 3.1  T_P 0.7
    beside     decode ---------------- 3.3                                   d_D 0.2, bound 0.5
               prefix    ------------ 2.0 with waits, all of it in decode    gained 0.5: all of the bound
    later      decode ----------- 3.3
               prefix       --------- 1.0, of it 0.7 in decode               3.6 together: 0.2 gained
    """
    beside = ran("beside", [step(9, 9, 9, 0), step(5.5, 3.3, 2.0, 2.0)])
    assert beside.longer(SERIAL) == pytest.approx(0.2)
    assert beside.bound(SERIAL) == pytest.approx(0.5)
    assert beside.gained(SERIAL) == pytest.approx(0.5)
    later = ran("later", [step(9, 9, 9, 0), step(5.5, 3.3, 1.0, 0.7)])
    assert later.gained(SERIAL) == pytest.approx(0.2)
    short = ran("short", [step(9, 9, 9, 0), step(5.5, 3.1, 0.7, 0.7)])
    tiny = ran("serial", [step(9, 9, 9, 0), step(6.0, 0.3, 5.0, 0.0)])
    assert short.bound(tiny) == pytest.approx(0.3)  # no more than the decode there is


def test_a_second_copy_of_the_actor_could_not_hide() -> None:
    """At the start, all engines ready: the driver's bytes but planned pages; contexts and buffers are smaller."""
    plan = megatron_plan(1)
    pages, actor = ran("r", [], plan=plan).at_start()[1], plan.object("actor.snapshot").bytes
    by_name = {o.name: o.bytes for o in plan.summary.objects}
    there = ("actor.snapshot", "actor.vision", "actor.case3", "reference.weights", "reference.vision")
    assert pages == sum(by_name[n] for n in (*there, "actor.master", "actor.moments"))

    def with_rest(rest: int) -> Ran:
        return ran("r", [], plan=plan, before=5, within=lambda start, stop: [0, pages + rest + 5])

    assert with_rest(actor - 1).second_copy() == 0
    assert with_rest(actor).second_copy() == actor
    assert with_rest(actor + 7).at_start() == (pages + actor + 7, pages)


def test_a_run_that_nobody_watched_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="r: the driver was not asked before the first step"):
        ran("r", [], within=lambda start, stop: []).second_copy()


def test_the_driver_is_asked_in_windows_behind_the_first_step() -> None:
    """Its most bytes in each, less what was in use before; the one that differs most is told."""
    plan = megatron_plan(1)
    first, last = plan.summary.windows[0], plan.summary.windows[-1]
    slices = ((first.name, 0, 10), (last.name, 10, 20), (first.name, 20, 30), (last.name, 30, 40))
    used = {0: [999], 10: [999], 20: [7 + first.hbm_bytes // 2, 8], 30: [7 + last.hbm_bytes]}
    found = ran("r", [], plan=plan, slices=slices, before=7, within=lambda start, stop: used[start])
    assert found.driven() == {first.name: first.hbm_bytes // 2, last.name: last.hbm_bytes}
    assert found.driven_off() == (pytest.approx(-0.5), first.name)
    assert found.windows_off() == 0.03


def test_the_last_line_sums_up_and_the_page_survives_parts_that_are_missing() -> None:
    """A page can be made of nothing, of some runs, and of everything; what failed is told in it."""
    found = Found()
    assert page(found, "versions").splitlines()[-1] == "no plan has run to its end"
    found.runs.append(SERIAL)
    found.runs.append(ran("solved", [step(9, 9, 9, 0), step(5.0, 3.3, 0.7, 0.7)]))
    assert summary(found) == (
        "serial 6.50 s (1.00x); solved 5.00 s (1.30x, 100% of the bound); windows within 3.0% of the plan; "
        "second copy 0 bytes"
    )
    found.stream = Stream(100, (55.0, 54.0, 50.0), {1: 0.1, 2: 0.05, 3: 0.04})
    found.published = Published(7 * GIB, GIB, 0.004, 0.010, 0.012)
    found.failed.append("4 streamed FAILED: it said so")
    lines = page(found, "versions").splitlines()
    assert "optimizer stream 80% of the link; publication 4.0 ms, gather and load 22.0 ms" in lines[-1]
    assert lines[-1].endswith("1 parts FAILED")
    assert lines[-2] == "4 streamed FAILED: it said so"
    assert "solved: 60 s in all; start: train 0 taking memory 1.2" in lines
    assert "40.0 GB/s to the GPU and 30.0 back; the link each way at once 50.0: 80% of it." in page(found, "versions")


def test_a_run_is_read_from_what_it_leaves(tmp_path: Path) -> None:
    """Report and trace of a run on a host: times of each step, windows on the clock that the driver is sampled by."""
    plan: Plan = tiny_plan(run={"steps": 2, "checkpoint_every": 0})
    run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path, progress=lambda event: None)
    asked: list[tuple[int, int]] = []
    found = read(tmp_path, "host", plan, 0, lambda start, stop: asked.append((start, stop)) or [1], 1.0)
    assert len(found.report["steps"]) == 2
    assert found.step.mean == pytest.approx(found.report["step_s"])
    assert found.overlap("decode_s").mean == pytest.approx(found.report["overlap"]["decode_s"])
    names = [w.name for w in plan.summary.windows]
    assert [name for name, _, _ in found.slices] == names * 2
    assert all(start < stop for _, start, stop in found.slices)
    assert found.windows_off() == 0
    found.driven()
    assert len(asked) == len(names)
    assert {row.split()[0] for row in found.stages("start")} == {"controller", "train", "rollout"}
    assert [row.rpartition(" ")[0] for row in found.stages("end")] == [
        "controller 0 digests of all state", "controller 0 writing final/", "controller 0 stopping engines",
    ]  # fmt: skip
    assert len(page(Found(runs=[found]), "versions").splitlines()) > 10


def test_publication_both_ways_comes_to_the_same_weights() -> None:
    found = measure(megatron_plan(1), torch.device("cpu"))
    plan = megatron_plan(1)
    layout = plan.summary.layout
    assert found.rebuilt <= layout.case3_buffer_bytes
    assert min(found.in_place, found.gather, found.load) > 0
    assert table.IN_FLIGHT == 3
