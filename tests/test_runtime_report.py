"""From spans and ledger logs to what a person reads: overlap, times, bytes, the trace and the printed page."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto import dropped
from rich.console import Console

from rollplex.backends.engine import EngineReport
from rollplex.backends.lanes import LaneSpan
from rollplex.backends.memory.ledger import Ledger
from rollplex.ir.steps import Barrier, Run, Signal, Step, Task, Wait
from rollplex.runtime.intervals import common, length
from rollplex.runtime.memorylog import MemoryLog, ObjectBytes, PlaceInPool, WindowBytes
from rollplex.runtime.metrics import MetricsWriter, running_mean
from rollplex.runtime.printing import print_report, sparkline
from rollplex.runtime.protocol import CONTROLLER, ProcessId
from rollplex.runtime.report import Overlap, Report, TimeLog, WindowTime, measured_overlap
from rollplex.runtime.spans import Span
from rollplex.runtime.stages import Stages, StageTime
from rollplex.runtime.trace import Trace, TraceFile

TRAIN, ROLLOUT = ProcessId("train", 0), ProcessId("rollout", 0)
INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda p: (min(p), max(p))), max_size=6)


def run(task: Task, process: ProcessId, start: float, stop: float, iteration: int = 0) -> Span:
    step = Run(window="P1 decode", task=task, node=task)
    return Span(process, iteration, step, int(start * 1e9), int(stop * 1e9))


@settings(max_examples=200, deadline=None)
@given(INTERVALS, INTERVALS)
def test_lengths_of_interval_sets_are_those_of_the_seconds_they_cover(a: list, b: list) -> None:
    def seconds(intervals: list[tuple[int, int]]) -> set[int]:
        return {t for start, stop in intervals for t in range(start, stop)}

    assert length(a) == len(seconds(a))
    assert common(a, b) == len(seconds(a) & seconds(b)) == common(b, a)


def test_hidden_prefix_is_what_ran_while_the_rollout_process_decoded() -> None:
    """
    decode    |------------------|          4 s, then 4 s
    prefix  |----|  |----|    |----|        hidden 1 + 2 + 1 of 6 s;  the second step hides nothing of 2 s
    """
    spans = [
        run("generate", ROLLOUT, 1, 8),
        run("prefix", TRAIN, 0, 2),
        run("prefix", TRAIN, 3, 5),
        run("prefix", TRAIN, 7, 9),
        run("generate", ROLLOUT, 20, 25, 1),
        run("prefix", TRAIN, 25, 27, 1),
    ]
    overlap = measured_overlap(spans)
    assert overlap == Overlap(decode_s=6.0, prefix_s=4.0, hidden_s=2.0)
    assert overlap.hidden_share == 0.5
    assert measured_overlap([]).hidden_share == 0.0


def held(start: float, stop: float, held_s: float, iteration: int = 0) -> Span:
    """A prefix that began when it had waited for its turn."""
    return replace(run("prefix", TRAIN, start, stop, iteration), held_ns=int(held_s * 1e9))


def test_what_waits_for_its_turn_is_no_prefix_work() -> None:
    """
    decode    |------------------|          8 s
    prefix      ......|--|    ...|--|       held 3 s and 2 s, works 1 s hidden and 1 s behind decode
    """
    overlap = measured_overlap([run("generate", ROLLOUT, 0, 8), held(4, 5, 3), held(8, 9, 2)])
    assert overlap == Overlap(decode_s=8, prefix_s=2, hidden_s=1, held_s=5)
    assert overlap.hidden_share == 0.5


def test_waiting_for_a_turn_is_waiting_of_its_window_and_on_the_page() -> None:
    from runtime_tiny import tiny_plan

    log = TimeLog(tiny_plan())
    log.add([held(4, 5, 3), run("generate", ROLLOUT, 0, 8)], step_s=10)
    (decode,) = (row for row in log.windows() if row.window == "P1 decode")
    assert (decode.measured_s, decode.waiting_s) == (4, 3)
    told = printed(replace(report(), overlap=Overlap(8.0, 1.0, 1.0, held_s=3.0)))
    assert "prefix work waited 3.00 s a step for its turn" in told
    assert "for its turn" not in printed(report())


def test_the_trace_shows_waiting_for_a_turn_as_waiting() -> None:
    """A slice of its own before the step's, inside of the window's."""
    (wait, work, window) = (e for e in Trace([TRAIN]).steps([held(4, 5, 3)]) if e["ph"] == "X")
    assert (wait["name"], wait["cat"], wait["dur"]) == ("wait for its turn", "wait", 3e6)
    assert (work["name"], work["dur"]) == ("run prefix prefix mb 0", 1e6)
    assert (window["dur"], wait["ts"] + wait["dur"]) == (4e6, work["ts"])


def test_an_arena_must_be_as_planned_to_the_byte_and_a_workspace_within_its_plan() -> None:
    def row(planned: int, measured: int, temporary: bool) -> bool:
        return ObjectBytes("w", "o", planned, measured, temporary).as_planned

    assert row(8, 8, temporary=False)
    assert not row(8, 7, temporary=False)
    assert not row(8, 9, temporary=False)
    assert row(8, 7, temporary=True)
    assert not row(8, 9, temporary=True)


def test_an_object_that_the_plan_does_not_have_shows_in_the_window_where_it_was_held() -> None:
    from runtime_tiny import tiny_plan

    plan, log = tiny_plan(), MemoryLog()
    ledger = Ledger.create("device 0", 1 << 30, process="train 0")
    ledger.mark("P2 train-actor")
    ledger.acquire("stowaway", 4096, "map stowaway")
    events, marks = ledger.take_log()
    log.add({TRAIN: EngineReport(events=tuple(events), marks=tuple(marks))})
    wrong = [row for row in log.objects(plan) if row.object == "stowaway"]
    assert wrong == [ObjectBytes("P2 train-actor", "stowaway", planned=0, measured=4096, temporary=False)]
    assert not wrong[0].as_planned


def test_the_trace_counts_microseconds_from_the_first_step_and_marks_barriers_once() -> None:
    barrier: Step = Barrier(window="P1 decode", name="rollout-complete")
    spans = [
        run("generate", ROLLOUT, 10.5, 11),
        Span(CONTROLLER, 0, barrier, int(10e9), int(11e9)),
        Span(ROLLOUT, 0, barrier, int(11e9), int(11e9)),
    ]
    events = list(Trace([CONTROLLER, ROLLOUT]).steps(spans))
    generate = next(e for e in events if e["name"] == "run generate generate mb 0")
    assert (generate["ts"], generate["dur"], generate["pid"]) == (0.5e6, 0.5e6, 2)
    assert [(e["name"], e["ts"]) for e in events if e["ph"] == "i"] == [("rollout-complete", 1e6)]
    windows = [e for e in events if e["ph"] == "X" and e["tid"] == 2]
    assert [(e["pid"], e["name"], e["dur"]) for e in windows] == [(1, "P1 decode", 1e6), (2, "P1 decode", 0.5e6)]
    json.dumps(events)


def test_an_arrow_leaves_inside_a_signal_and_enters_inside_the_wait_that_it_ends() -> None:
    spans = [
        Span(ROLLOUT, 0, Signal(window="w", event="rollout"), 100, 200),
        Span(CONTROLLER, 0, Wait(window="w", event="rollout"), 50, 300),
        Span(TRAIN, 0, Wait(window="w", event="rollout"), 60, 310),
        Span(TRAIN, 0, Wait(window="w", event="reward"), 320, 330),
    ]
    events = list(Trace([CONTROLLER, TRAIN, ROLLOUT]).steps(spans))
    out, into = ([e for e in events if e["ph"] == ph] for ph in "sf")
    assert [e["id"] for e in out] == [e["id"] for e in into] == [1, 2]
    assert [(e["pid"], e["ts"]) for e in out] == [(3, 0.05), (3, 0.05)]
    assert [(e["pid"], e["bp"]) for e in into] == [(1, "e"), (2, "e")]
    slices = {e["pid"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == 1}
    for e, (start, stop) in zip(into, (slices[1], (0.01, 0.26)), strict=True):
        assert start <= e["ts"] < stop


def test_an_arrow_is_shown_whatever_the_nanosecond() -> None:
    """A wait of 30 ns at any time of a long run: its slice may end a nanosecond early, its arrow is still on it."""
    trace = Trace([CONTROLLER, ROLLOUT])
    named = list(trace.names())
    for start in (*range(0, 2000, 7), *range(17220768000, 17220768200), *range(10**14, 10**14 + 500, 3)):
        spans = [
            Span(ROLLOUT, 0, Signal(window="w", event="rollout"), start, start + 9),
            Span(CONTROLLER, 0, Wait(window="w", event="rollout"), start + 1, start + 31),
        ]
        assert dropped([*named, *trace.steps(spans)]) == []


@pytest.mark.parametrize(
    ("what", "events"),
    [
        ("overlaps", [{"ph": "X", "ts": 0.0, "dur": 2.0}, {"ph": "X", "ts": 1.0, "dur": 2.0}]),
        ("on no slice", [{"ph": "s", "ts": 1.0, "id": 1, "cat": "c"}]),
        ("leads nowhere", [{"ph": "X", "ts": 1.0, "dur": 1.0}, {"ph": "s", "ts": 1.0, "id": 1, "cat": "c"}]),
        ("comes from nowhere", [{"ph": "X", "ts": 1.0, "dur": 1.0}, {"ph": "f", "ts": 1.0, "id": 1, "cat": "c"}]),
        ("without ['dur']", [{"ph": "X", "ts": 0.0}]),
        ("a counter of no number", [{"ph": "C", "ts": 0.0, "args": {"held": "much"}}]),
    ],
)
def test_what_perfetto_would_drop_is_told(what: str, events: list[dict[str, Any]]) -> None:
    """Each event of the list is on one named track."""
    named = [{"ph": "M", "name": f"{kind}_name", "pid": 1, "tid": 1, "args": {}} for kind in ("process", "thread")]
    made = [{"name": "a", "pid": 1, "tid": 1, **event} for event in events]
    assert any(what in line for line in dropped([*named, *made]))


def test_a_counter_of_each_gpu_follows_its_ledger() -> None:
    ledgers = [Ledger.create(f"device {gpu}", 1 << 20, process=f"train {gpu}") for gpu in (0, 1)]
    trace = Trace([CONTROLLER, TRAIN, ProcessId("train", 1)])
    list(trace.steps([run("prefix", TRAIN, 0, 1)]))
    for ledger in ledgers:
        ledger.acquire("a", 8192, "map a")
        ledger.acquire("b", 4096, "map b")
        ledger.touch("a", 100, "run")
    ledgers[0].release("a", "unmap a")
    logs = [tuple(ledger.take_log()[0]) for ledger in ledgers]
    counters = list(trace.counters({ProcessId("train", gpu): EngineReport(events=logs[gpu]) for gpu in (0, 1)}))
    found = [(e["name"].removeprefix("HBM bytes of "), e["args"]["held"]) for e in counters]
    assert found == [("gpu 0", 8192), ("gpu 0", 12288), ("gpu 0", 4096), ("gpu 1", 8192), ("gpu 1", 12288)]
    assert [e["pid"] for e in counters] == [2, 2, 2, 3, 3]
    assert all(e["ph"] == "C" for e in counters)


def test_a_trace_says_when_its_time_0_was() -> None:
    """Once: what else watched the machine is set beside it by that."""
    trace = Trace([CONTROLLER, TRAIN])
    events = [*trace.steps([run("prefix", TRAIN, 5, 6)]), *trace.steps([run("prefix", TRAIN, 8, 9, 1)])]
    (origin,) = (e["args"]["monotonic_ns"] for e in events if e["name"] == "time_0")
    first = next(e for e in events if e["ph"] == "X")
    assert (origin, first["ts"]) == (run("prefix", TRAIN, 5, 6).start_ns, 0)


def test_lanes_are_tracks_of_their_process() -> None:
    trace = Trace([CONTROLLER, TRAIN])
    list(trace.steps([run("prefix", TRAIN, 0, 1)]))
    lanes = (LaneSpan("update", "update of chunk 0", 30, 40), LaneSpan("load", "load of chunk 0", 10, 20))
    first, second = (list(trace.lanes({TRAIN: EngineReport(lanes=lanes)})) for _ in range(2))
    for events in (first, second):
        slices = [(e["pid"], e["tid"], e["name"]) for e in events if e["ph"] == "X"]
        assert slices == [(2, 3, "load of chunk 0"), (2, 4, "update of chunk 0")]
    assert ([e["ph"] for e in first], [e["ph"] for e in second]) == (["M", "X", "M", "X"], ["X", "X"])


def test_the_trace_of_a_killed_run_lacks_its_last_bracket_only(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "trace.json", [CONTROLLER, ROLLOUT]) as trace:
        for i in range(2):
            trace.write([run("generate", ROLLOUT, 2 * i, 2 * i + 1, i)], {})
        on_disk = (tmp_path / "trace.json").read_text()
    whole = json.loads((tmp_path / "trace.json").read_text())
    assert json.loads(on_disk + "]}") == whole
    assert len([e for e in whole["traceEvents"] if e["ph"] == "X" and e["tid"] == 1]) == 2


def test_times_are_means_over_iterations_without_the_first() -> None:
    """The first iteration measures workspaces; it counts only as long as there is no other."""
    from runtime_tiny import tiny_plan

    log = TimeLog(tiny_plan())
    log.add([run("prefix", TRAIN, 0, 8), run("generate", ROLLOUT, 0, 8)], step_s=10)
    assert (log.step_s, log.overlap) == (10, Overlap(8, 8, 8))
    log.add([run("prefix", TRAIN, 0, 1), run("generate", ROLLOUT, 0, 2)], step_s=3)
    wait: Step = Wait(window="P1 decode", event="rollout")
    log.add([run("prefix", TRAIN, 4, 7), run("generate", ROLLOUT, 5, 9), Span(TRAIN, 2, wait, 0, 10**9)], step_s=5)
    assert (log.step_s, log.overlap) == (4, Overlap(3, 2, 1.5))
    (decode,) = (row for row in log.windows() if row.window == "P1 decode")
    assert (decode.measured_s, decode.waiting_s) == (2.5, 0.5)
    assert [(s.step_s, s.overlap.hidden_s, s.windows) for s in log.steps] == [
        (10, 8, {"P1 decode": 8}), (3, 1, {"P1 decode": 1}), (5, 2, {"P1 decode": 3}),
    ]  # fmt: skip


def test_stages_end_where_the_next_begins_and_start_and_end_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has its own; the report prints them, of the first process of a kind."""
    clock = iter([0.0, 1.0, 3.0, 10.0, 20.0, 24.0])
    monkeypatch.setattr("rollplex.runtime.stages.time.monotonic", lambda: next(clock))
    seen: list[Any] = []
    stages = Stages(seen.append)
    stages.begin(TRAIN, "importing host")
    stages.begin(ProcessId("train", 1), "importing host")
    stages.begin(TRAIN, "taking memory")
    stages.begin(TRAIN, "")
    stages.phase = "end"
    stages.begin(CONTROLLER, "writing final/")
    stages.begin(CONTROLLER, "")
    assert [(s.phase, s.process, s.stage, s.seconds) for s in stages.found] == [
        ("start", "train 0", "importing host", 3.0),
        ("start", "train 0", "taking memory", 7.0),
        ("end", "controller 0", "writing final/", 4.0),
    ]
    assert [str(event.process) for event in seen] == ["train 0", "train 1", "train 0", "controller 0"]
    shown = report()
    shown.stages = [*stages.found, StageTime("start", "train 1", "taking memory", 9.0)]
    lines = printed(shown).splitlines()
    assert lines[-2:] == [
        "start      train: importing host 3.0, taking memory 7.0 s",
        "end        controller: writing final/ 4.0 s",
    ]


def report() -> Report:
    return Report(
        "grpo.py:grpo", "rollplex", 3, 3, step_s=1.25, reward="reward",
        metrics=[{"reward": 0.25}, {"reward": 0.5}, {"reward": 0.75}],
        times=[WindowTime("P1 decode", "P1", 0.5, 1.0, 0.125)],
        overlap=Overlap(1.0, 0.5, 0.25),
        memory=[WindowBytes("P1 decode", 3 << 20, 3 << 20)],
        objects=[ObjectBytes("P1 decode", "rollout.kv", 3 << 20, 3 << 20, False)],
    )  # fmt: skip


def printed(shown: Report) -> str:
    out = io.StringIO()
    print_report(shown, Console(file=out, width=100))
    return out.getvalue()


def test_the_printed_report_has_reward_times_overlap_and_bytes() -> None:
    text = printed(report())
    assert "3 of 3 steps, 1.25 s a step" in text
    assert "reward     0.250 -> 0.750   ▁▄█" in text
    assert "prefix 0.50 s a step; 0.25 s of it (50%) ran while rollout was decoding" in text
    assert "memory     as planned: 1 objects equal, 0 workspaces within plan" in text
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_the_printed_report_names_what_was_not_as_planned_and_an_early_end() -> None:
    shown = report()
    shown.objects.append(ObjectBytes("P1 decode", "actor.boundary", 4096, 8192, False))
    shown.ended, shown.steps_done = "EngineError: engine process: train 0 died", 2
    text = printed(shown)
    assert "memory     P1 decode: actor.boundary measured 8192, planned 4096 bytes" in text
    assert "2 of 3 steps, 1.25 s a step (EngineError" in text
    assert "pool " not in text


def test_the_printed_report_says_whether_objects_lay_at_their_places_in_the_pinned_pool() -> None:
    shown = report()
    shown.places = [PlaceInPool(w, "actor.master", (0, 64), (0, 64)) for w in ("P1 decode", "P3 update")]
    assert "pool       as planned: 1 objects at their places" in printed(shown)
    assert shown.memory_as_planned
    shown.places += [
        PlaceInPool("P3 update", "actor.moments", (64, 128), (128, 192)),
        PlaceInPool("P3 update", "actor.gradients", (64, 128), None),
    ]
    text = printed(shown)
    assert "pool       P3 update: actor.moments at bytes 128 to 192, planned 64 to 128" in text
    assert "pool       P3 update: actor.gradients at bytes none, planned 64 to 128" in text
    assert "at their places" not in text
    assert not shown.memory_as_planned


def test_an_object_at_another_place_or_in_another_window_shows_there() -> None:
    """The log has what was put and when; the plan where it belongs, in all windows that a place lists."""
    from runtime_tiny import tight_plan

    plan, log = tight_plan(), MemoryLog()
    pool = Ledger.create("host", 1 << 30, process="train 0")
    place = next(p for p in plan.summary.host_pool.offsets if p.object == "actor.moments")
    pool.acquire("actor.moments", place.bytes, "allocate pinned", place.offset + 4096)
    pool.mark("P2 train-actor")
    events, marks = pool.take_log()
    log.add({TRAIN: EngineReport(pool_events=tuple(events), pool_marks=tuple(marks))})
    (row,) = (r for r in log.places(plan) if (r.window, r.object) == ("P2 train-actor", "actor.moments"))
    assert (row.planned, row.measured) == (
        (place.offset, place.offset + place.bytes), (place.offset + 4096, place.offset + 4096 + place.bytes)
    )  # fmt: skip
    (row,) = (r for r in log.places(plan) if (r.window, r.object) == ("P3 update", "actor.moments"))
    assert (row.planned is not None, row.measured) == (True, None)


@pytest.mark.parametrize(("values", "line"), [([0.0, 1.0], "▁█"), ([2.0, 2.0], "▁▁"), ([1.0], "▁")])
def test_a_sparkline_spans_its_own_range(values: list[float], line: str) -> None:
    assert sparkline(values) == line
    assert len(sparkline([float(i) for i in range(1000)])) <= 60


def test_metrics_are_on_disk_as_soon_as_their_iteration_ends(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward": 0.5})
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"iteration": 0, "reward": 0.5}
    assert running_mean([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]
