"""The page of H200s: its formulas on steps that are known, its verdicts, its sentences; parts of it on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from h200_runs import Counted, ran, step
from megatron_tiny import megatron_plan
from runtime_tiny import luck, tiny_plan

from benchmarks.h200.pages import page
from benchmarks.h200.parts import Found
from benchmarks.h200.plans import HERE
from benchmarks.h200.ran import Gpu, Ran, Repeats
from benchmarks.h200.running import read
from benchmarks.h200.surface import surface
from benchmarks.h200.verdict import GAP, IN_FLIGHT, problems, summary
from benchmarks.optimizer_gpu import Stream
from benchmarks.publication_gpu import Published, measure
from rollplex.ir.calibration import parse_calibration, read_calibration
from rollplex.ir.errors import RunError
from rollplex.ir.plan import Plan
from rollplex.runtime.run import run_plan

GIB = 2**30
SERIAL_PLAN = megatron_plan(1, schedule="serial")
STEPS = [step(99, 99, 99, 0), step(6.0, 3.0, 0.6, 0.0), step(7.0, 3.2, 0.8, 0.0)]
SERIAL = ran("serial", STEPS, plan=SERIAL_PLAN)
ONE_GPU = read_calibration(HERE / "h200_3b.json")


def shown(found: Found) -> str:
    return page(found, "versions", GAP, "solved", ONE_GPU)


# ---- time


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


def test_new_weights_come_at_a_rate() -> None:
    """Bytes of the plan's own steps over what they took, step by step."""
    plan = megatron_plan(2)
    layout = plan.summary.layout
    found = ran("r", [], plan=plan, exchanges=(0.25, 0.75))
    assert found.sent() == layout.exchange_bytes_per_gpu > 0
    assert found.exchange() == (0.5, found.sent() / 0.5 / 1e9)
    assert ran("r", []).exchange() == (0.0, 0.0)


# ---- bytes


def test_a_second_copy_of_the_actor_could_not_hide() -> None:
    """At the start, all engines ready: the driver's bytes but planned pages and contexts; buffers are smaller."""
    plan = megatron_plan(1)
    found = ran("r", [], plan=plan)
    pages, actor = found.pages(found.gpus[0]), plan.object("actor.snapshot").bytes
    by_name = {o.name: o.bytes for o in plan.summary.objects}
    there = ("actor.snapshot", "actor.vision", "actor.case3", "reference.weights", "reference.vision")
    assert pages == sum(by_name[n] for n in (*there, "actor.master", "actor.moments"))
    beside = 3 << 30
    objects = (
        *plan.summary.objects,
        plan.object("actor.snapshot").model_copy(update={"name": "train.context", "bytes": beside, "start": "-"}),
    )
    found = ran("r", [], plan=plan.model_copy(update={"summary": plan.summary.model_copy(update={"objects": objects})}))
    own = pages + beside
    assert found.second_copy(Gpu(0, 1, own + actor - 1, {})) == 0
    assert found.second_copy(Gpu(0, 1, own + actor, {})) == actor
    assert found.second_copy(Gpu(0, 2, 2 * own + actor + 7, {})) == actor + 7  # two ranks on it


def test_the_window_that_differs_most_is_told_each_way() -> None:
    plan = megatron_plan(1)
    first, last = plan.summary.windows[0], plan.summary.windows[-1]
    gpu = Gpu(0, 1, 0, {first.name: first.hbm_bytes // 2, last.name: last.hbm_bytes + last.hbm_bytes // 10})
    found = ran("r", [], plan=plan, gpus=(gpu,))
    assert found.driven_off(gpu) == [(pytest.approx(-0.5), first.name), (pytest.approx(0.1, abs=1e-6), last.name)]
    assert found.driven_off(replace(gpu, ranks=2))[1] == (pytest.approx(-0.45, abs=1e-6), last.name)
    assert found.windows_off() == 0.03


# ---- what does not hold


def wrong(found: Ran, **parts: Any) -> list[str]:
    return list(problems(Found([found], **parts), GAP))


def test_what_holds_is_told_as_such() -> None:
    assert wrong(SERIAL) == []
    assert summary(Found([SERIAL]), GAP).endswith("second copy 0 bytes; all holds")
    assert summary(Found([SERIAL], missing=["soak"]), GAP).endswith("parts not run yet: 1; all holds")


def test_engines_that_are_apart_are_told() -> None:
    """Every step counts, also one that nobody compared; on two GPUs a step comes behind three updates."""
    gaps = [{"logprob_gap": 0.05}, {"logprob_gap": 0.0501}, {}]
    assert wrong(ran("r", STEPS, metrics=gaps)) == [
        "step 2 of r: trainer and rollout engine are 0.0501 nats apart, over 0.05",
        "step 3 of r: nobody compared trainer and rollout engine",
    ]
    both = (SERIAL.gpus[0], replace(SERIAL.gpus[0], device=1))
    told = ["r: 3 steps, and behind 3 updates comes step 4"]
    assert wrong(ran("r", STEPS, metrics=[{"logprob_gap": 0.0}] * 3, gpus=both)) == told
    assert wrong(ran("r", STEPS, metrics=[{"logprob_gap": 0.0}] * 4, gpus=both)) == []


def test_every_rollout_engine_counts() -> None:
    """On two GPUs the engine that is further away is told; one that nobody compared is."""
    rows = [{"logprob_gap": 0.04, "logprob_gap_engine_0": 0.02, "logprob_gap_engine_1": n} for n in (0.05, 0.06)]
    found = ran("r", STEPS, plan=megatron_plan(2), metrics=[*rows, {"logprob_gap": 0.0, "logprob_gap_engine_1": 0.1}])
    assert wrong(found) == [
        "step 2 of r: trainer and rollout engine are 0.06 nats apart, over 0.05",
        "step 3 of r: nobody compared trainer and rollout engine",
    ]


def test_bytes_that_are_over_are_told_by_gpu_and_window() -> None:
    """5% over a window's plan is allowed, a byte more is not, on whichever GPU; a GPU that nobody saw is none."""
    window = SERIAL_PLAN.summary.windows[2]
    most = window.hbm_bytes + window.hbm_bytes // 20
    fine = Gpu(0, 1, 0, {window.name: most})
    over = Gpu(1, 1, 0, {window.name: most + 1 + window.hbm_bytes // 1000})
    told = wrong(ran("r", STEPS, plan=SERIAL_PLAN, metrics=[{"logprob_gap": 0.0}] * 4, gpus=(fine, over)))
    assert len(told) == 1
    assert f"in use in {window.name}, 5.1% over its plan of" in told[0]
    assert told[0].startswith("r: GPU 1 has ")
    assert wrong(ran("r", STEPS, gpus=(Gpu(3, 1, 0, {}),))) == ["r: GPU 3 was not looked at in any window"]
    again = replace(SERIAL.gpus[0], at_start=10**9)
    assert wrong(ran("r", STEPS, gpus=(again,)))[0].endswith("bytes beside planned pages, room for the actor once more")


def test_ledgers_and_objects_are_held_to_the_plan() -> None:
    rows = [{"window": "w", "planned": 1000, "measured": 949}]
    assert wrong(ran("r", STEPS, memory=rows)) == [
        "r: by the engines' ledgers a window is 5.1% off its plan, over 5%",
    ]
    assert wrong(ran("r", STEPS, memory_as_planned=False)) == ["r: objects are not as planned, see its report.json"]


def test_a_soak_that_ends_early_and_values_that_did_not_come_are_told() -> None:
    short = ran("soak", STEPS, plan=tiny_plan(run={"steps": 3}), ended="interrupted")
    assert wrong(SERIAL, soak=short) == ["soak: 1 of 3 steps, it ended interrupted"]
    ranks = [{"ms": {"NCCL, slabs": 2.0}, "right": right, "bytes": 10, "calls": 1} for right in (True, False)]
    assert wrong(SERIAL, exchanged=ranks) == ["exchange: values did not come as they were sent"]
    assert wrong(SERIAL, failed=["soak FAILED: why"]) == ["soak FAILED: why"]


def sharing(kind: str, name: str, decode: float, prefix: float, hidden: float, step_s: float = 6.4, **job: Any) -> Ran:
    """A run that shares so, beside SERIAL, whose decode takes 3.1 s and whose prefixes 0.7."""
    plan = megatron_plan(1)
    plan = plan.model_copy(update={"job": {**plan.job, "sharing": {"kind": kind}, **job}})
    return ran(name, [step(9, 9, 9, 0), step(step_s, decode, prefix, hidden)], plan=plan)


def test_a_solved_share_is_held_against_mps_default_and_serial() -> None:
    """
    default   3.4 of decode hide 0.9 of prefixes: 0.4 of 0.7 are gained
    solved    3.3, all hidden: 0.5; or 3.4, 1.0 of which 0.1 came later: 0.3
    """
    default, fine = sharing("mps", "default", 3.4, 0.9, 0.9), sharing("solved", "solved", 3.3, 0.9, 0.9)
    assert list(problems(Found([SERIAL, default, fine]), GAP)) == []
    worse = sharing("solved", "solved", 3.4, 1.0, 0.9, step_s=6.6)
    assert list(problems(Found([SERIAL, default, worse]), GAP)) == [
        "solved: a step takes 6.60 s, serial 6.50 s",
        "solved: gains 0.30 s, and 0.40 s are gained without a partition",
    ]
    assert list(problems(Found([default, worse]), GAP)) == []  # nothing to hold it against
    seeds = {**worse.plan.job["run"], "seed": 5}
    assert list(problems(Found([SERIAL, sharing("mps", "default", 3.4, 0.9, 0.9, run=seeds), worse]), GAP)) == []


def test_the_fastest_step_is_held_against_what_was_asked_for() -> None:
    quick = ran("solved", [step(9, 9, 9, 0), step(5.6, 3.3, 0.7, 0.7)])
    told = ["solved: a step takes 5.60 s, over 5.5, and no other takes less"]
    assert list(problems(Found([SERIAL, quick]), GAP, 5.5)) == told
    assert list(problems(Found([SERIAL, quick]), GAP, 5.6)) == []
    text = page(Found([SERIAL, quick]), "versions", GAP, "solved", ONE_GPU, 5.5)
    assert "Bound of the gap here: 0.05 nats; of a step 5.5 s." in text
    assert text.endswith("1 DO NOT HOLD, above\n")


def test_what_is_measured_without_a_run_has_its_goals() -> None:
    """85% of the link, to the last byte; new weights in place within what gathering and loading take."""
    for seconds, gather, told in (
        (32 / 850, 0.003, []),
        (32 / 849, 0.003, ["optimizer stream: 84.9% of the duplex link, under 85%"]),
        (32 / 850, 0.002, ["publication: 4.0 ms in place, 4.0 ms by gather and load"]),
    ):
        stream = Stream(100, (55.0, 54.0, 50.0), {IN_FLIGHT: seconds})
        assert wrong(SERIAL, stream=stream, published=Published(7, 1, 0.004, gather, 0.002)) == told


# ---- the page


def test_the_last_line_sums_up_and_the_page_survives_parts_that_are_missing() -> None:
    """A page can be made of nothing, of some runs, and of everything; what failed is told in it."""
    found = Found()
    assert shown(found).splitlines()[-1] == "no plan has run to its end"
    found.runs.append(SERIAL)
    found.runs.append(ran("solved", [step(9, 9, 9, 0), step(5.0, 3.3, 0.7, 0.7)]))
    assert summary(found, GAP) == (
        "serial 6.50 s (1.00x); solved 5.00 s (1.30x, 100% of the bound); logprob gap at most 0.02 of 0.05 nats; "
        "windows within 3.0% of the plan; drivers at most -50.0%; second copy 0 bytes; all holds"
    )
    found.stream = Stream(100, (55.0, 54.0, 50.0), {1: 0.1, 2: 0.05, 3: 0.04})
    found.published = Published(7 * GIB, GIB, 0.004, 0.010, 0.012)
    found.failed.append("4 streamed FAILED: it said so")
    lines = shown(found).splitlines()
    assert "optimizer stream 80% of the link; publication 4.0 ms, gather and load 22.0 ms" in lines[-1]
    assert lines[-1].endswith("2 DO NOT HOLD, above")
    assert lines[-4:-2] == [
        "4 streamed FAILED: it said so",
        "optimizer stream: 80.0% of the duplex link, under 85%",
    ]
    assert "solved: 60 s in all; start: train 0 taking memory 1.2" in lines
    assert "40.0 GB/s to the GPU and 30.0 back; the link each way at once 50.0: 80% of it." in shown(found)
    assert IN_FLIGHT == 3


def test_a_run_without_its_serial_one_has_no_bound() -> None:
    """A serial run that failed, or of other rollout engines, is not what others are held against."""
    alone = ran("solved", [step(9, 9, 9, 0), step(5.0, 3.3, 0.7, 0.7)])
    row = next(line for line in shown(Found([alone])).splitlines() if line.startswith("| solved"))
    assert [cell.strip() for cell in row.split("|")[2:13]] == [
        "5.00 (5.00..5.00)", "-", f"{alone.plan.summary.times.step_s:.2f}", "3.30 (3.30..3.30)", "0.70 (0.70..0.70)",
        "0.70 (0.70..0.70)", "-", "-", "-", "-", "2.50 (2.50..2.50)",
    ]  # fmt: skip
    assert "solved 5.00 s; logprob gap" in summary(Found([alone]), GAP)


def test_windows_of_the_named_plan_are_told_one_by_one() -> None:
    plan = megatron_plan(1)
    first, second = plan.summary.windows[:2]
    gpus = (Gpu(0, 1, 0, {first.name: first.hbm_bytes}), Gpu(1, 1, 0, {first.name: first.hbm_bytes * 3 // 2}))
    lines = shown(Found([SERIAL, ran("solved", STEPS, plan=plan, gpus=gpus)])).splitlines()
    at = lines.index("Windows of solved:")
    assert lines[at + 2] == "| window | planned GiB | by ledgers | GPU 0 GiB | GPU 1 GiB |"
    assert lines[at + 4].startswith(f"| {first.name} | ")
    assert lines[at + 4].count("(+0.0%)") == lines[at + 4].count("(+50.0%)") == 1
    assert lines[at + 5].startswith(f"| {second.name} | ")
    assert lines[at + 5].endswith(" | - | - |")


def test_ways_of_the_exchange_stand_beside_what_was_measured_before() -> None:
    """The slower rank counts: 3 GB in 10 ms are 300 GB/s."""
    ways = [{"NCCL, whole": 9.0, "direct, slabs": 8.0}, {"NCCL, whole": 10.0, "direct, slabs": 7.5}]
    ranks = [{"ms": ms, "right": True, "bytes": 3 * 10**9, "calls": 3} for ms in ways]
    text = shown(Found([SERIAL], exchanged=ranks))
    assert "| NCCL, whole | 10.00 | 300 |\n| direct, slabs | 8.00 | 375 |" in text
    assert "Measured before on such a pair, one call of 2 GiB: NCCL 303 GB/s, direct 390 GB/s." in text
    assert "publication NCCL, whole 10.0 ms, direct, slabs 8.0 ms" in text.splitlines()[-1]


def test_a_surface_stands_beside_another() -> None:
    """Of one GPU at batch 4 on 80 SMs: 1.30 times as long, 0.60 of the rate (calibration_h200.md)."""
    data = json.loads(ONE_GPU.to_json())
    data["shape"]["train_tp"] = 2
    for row in data["surface"]["rows"]:
        row["step_s"] *= 2.0
    lines = surface(parse_calibration(data, "two"), ONE_GPU)
    head = [cell.strip() for cell in lines[2].split("|")]
    row = next([c.strip() for c in line.split("|")] for line in lines if line.startswith("| 4 |"))
    own, other = (head.index(f"TP {tp} to 1: alone, ms") for tp in (2, 1))
    sms = head.index("80 SMs") - own
    assert row[own] == row[other] == "4.60"
    assert row[other + sms].startswith("1.30x, 0.60, 1.3")
    assert float(row[own + sms].split("x")[0]) == pytest.approx(2 * 1.30, abs=0.02)
    assert "MPS default" in head
    assert surface(ONE_GPU.model_copy(update={"surface": None}), ONE_GPU)[0].startswith("no surface")


# ---- from a run


def test_a_run_is_read_from_what_it_leaves(tmp_path: Path) -> None:
    """Report and trace of a run on a host: times of each step, windows on the clock that the driver is sampled by."""
    plan: Plan = tiny_plan(run={"steps": 2, "checkpoint_every": 0})
    run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path, progress=lambda event: None)
    driver = Counted(0)
    found = read("host", plan, tmp_path, {0: driver}, 1.0)
    assert len(found.report["steps"]) == 2
    assert found.overlap("decode_s").each == tuple(s["overlap"]["decode_s"] for s in found.report["steps"][1:])
    names = [w.name for w in plan.summary.windows]
    assert list(found.gpus[0].driven) == names
    assert len(driver.asked) == 1 + len(names)  # before the first step, and in windows behind it
    assert driver.asked[0][1] == driver.asked[0][0] + 10**9
    assert all(start < stop for start, stop in driver.asked)
    assert driver.asked[0][1] < driver.asked[1][0]
    assert found.windows_off() == 0
    assert {row.split()[0] for row in found.stages("start")} == {"controller", "train", "rollout"}
    assert [row.rpartition(" ")[0] for row in found.stages("end")] == [
        "controller 0 digests of all state", "controller 0 writing final/", "controller 0 stopping engines",
    ]  # fmt: skip
    assert Ran.of_data("host", plan, json.loads(json.dumps(found.data()))) == found
    with pytest.raises(RunError, match="host: the driver of GPU 0 was not asked before the first step"):
        read("host", plan, tmp_path, {0: Counted(0, samples=0)}, 1.0)


def test_publication_both_ways_comes_to_the_same_weights() -> None:
    found = measure(megatron_plan(1), torch.device("cpu"))
    plan = megatron_plan(1)
    layout = plan.summary.layout
    assert found.rebuilt <= layout.case3_buffer_bytes
    assert min(found.in_place, found.gather, found.load) > 0
