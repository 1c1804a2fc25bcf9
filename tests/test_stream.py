"""Chunks in a ring of workspaces: the bits of torch.optim whatever overlaps, and an end for whatever goes wrong.

load     |-0-|-1-|-2-|-3-|            in_flight 3: three workspaces, chunk 3 waits for the store of chunk 0
update       |-0-|-1-|-2-|-3-|
store            |-0-|-1-|-2-|-3-|
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_threads import TRAIN, InThreads
from runtime_tiny import luck, tight_plan
from test_optimizer import CONFIG, fill_grad, fresh_state, named, reference, sizes_strategy

from rollplex.backends.engine import EngineReport
from rollplex.backends.lanes import LaneSpan, ThreadLanes
from rollplex.backends.memory.live import LiveBytes
from rollplex.ir.errors import EngineError, OutOfMemory
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan
from rollplex.ir.steps import UpdateChunk
from rollplex.runtime.optimizer import AdamConfig, ChunkedAdam, FlatState, clip_scale, flat_layout, global_norm
from rollplex.runtime.spans import Span
from rollplex.runtime.stream import UPDATE, ChunkStream, in_place, ring
from rollplex.runtime.trace import Trace

torch.set_num_threads(1)
STAGES = ("load", "update", "store")


def ranges(numel: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


def stream_of(
    state: FlatState, adam: ChunkedAdam, size: int, in_flight: int, step: int = 1, scale: float = 1.0
) -> ChunkStream:
    chunks = ranges(len(state.master), size)
    rooms = ring(chunks, in_flight, state.master.dtype) if in_flight else in_place(state, chunks)
    return ChunkStream(adam, chunks, rooms, ThreadLanes(UPDATE, 20), step, scale, "actor")


def drive(stream: ChunkStream) -> None:
    for index in range(len(stream.chunks)):
        stream.update(index)


def lanes_at_work() -> list[str]:
    """Threads of lanes that are still there a moment after they were told to end."""
    for _ in range(100):
        if not _lane_threads():
            break
        time.sleep(0.01)
    return _lane_threads()


def _lane_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("lane ")]


# ---- what is computed


@given(
    sizes=sizes_strategy,
    size=st.integers(1, 100),
    in_flight=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    decoupled=st.booleans(),
    undecayed=st.sets(st.integers(0, 5)),
    max_norm=st.none() | st.floats(0.01, 5.0),
)
@settings(max_examples=60, deadline=None)
def test_what_overlaps_is_torch_adam_to_the_bit(
    sizes: list[int],
    size: int,
    in_flight: int,
    dtype: torch.dtype,
    decoupled: bool,
    undecayed: set[int],
    max_norm: float | None,
) -> None:
    """in_flight 0 is the update in place. Three steps, clipped, two groups of weight decay, a snapshot in bfloat16."""
    config = AdamConfig(CONFIG.lr, CONFIG.betas, CONFIG.eps, CONFIG.weight_decay, decoupled)
    slabs = flat_layout(named(sizes), decay=lambda name: int(name[1:]) not in undecayed)
    state = fresh_state(sum(sizes), dtype)
    snapshot = {slab.name: torch.zeros(slab.numel, dtype=torch.bfloat16) for slab in slabs}
    start, grads = state.master.clone(), []
    adam = ChunkedAdam(config, slabs, state, snapshot)
    for step in (1, 2, 3):
        fill_grad(state, step)
        scale = clip_scale(global_norm(state.grad, slabs), max_norm)
        grads.append(state.grad * scale)
        drive(stream_of(state, adam, size, in_flight, step, scale))
    for got, want in zip(
        (state.master, state.exp_avg, state.exp_avg_sq), reference(slabs, start, grads, config), strict=True
    ):
        assert torch.equal(got, want)
    for slab in slabs:
        assert torch.equal(snapshot[slab.name], state.master[slab.offset : slab.stop].bfloat16())


@given(numel=st.integers(1, 300), size=st.integers(1, 100), in_flight=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_workspaces_are_those_of_the_chunks_in_flight_and_nothing_else(numel: int, size: int, in_flight: int) -> None:
    """min(in_flight x chunk, all) x 4 states and, in the thread that updates, two temporaries of a chunk."""
    state = fresh_state(numel, torch.float32)
    fill_grad(state, 1)
    for config in (CONFIG, replace(CONFIG, decoupled=False)):
        adam = ChunkedAdam(config, flat_layout(named([numel])), state, {})
        with LiveBytes() as live:
            drive(stream_of(state, adam, size, in_flight))
        chunk = min(size, numel)
        small = 64  # the step count and its powers
        assert live.peak_bytes <= (min(in_flight * size, numel) * 4 + 2 * chunk) * 4 + small


class Held(ChunkedAdam):
    """Counts the chunks between the start of their load and the end of their store; each stage may be made to act."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held, self.most = 0, 0
        self.counting = threading.Lock()
        self.act: Mapping[tuple[str, int], Callable[[], object]] = {}

    def load(self, start: int, stop: int, scale: float, workspace: Any = None) -> Any:
        with self.counting:
            self.held += 1
            self.most = max(self.most, self.held)
        self._act("load", start)
        return super().load(start, stop, scale, workspace)

    def update(self, work: Any, start: int, stop: int, step: int) -> None:
        self._act("update", start)
        super().update(work, start, stop, step)

    def store(self, work: Any, start: int, stop: int) -> None:
        self._act("store", start)
        super().store(work, start, stop)
        with self.counting:
            self.held -= 1

    def _act(self, stage: str, start: int) -> None:
        self.act.get((stage, start), lambda: None)()


def held_stream(
    in_flight: int, act: Mapping[tuple[str, int], Callable[[], object]], patience_s: float = 20
) -> ChunkStream:
    """Chunks of 10 elements of 60; `act` by stage and first element."""
    state = fresh_state(60, torch.float32)
    fill_grad(state, 1)
    adam = Held(CONFIG, flat_layout(named([60])), state, {})
    adam.act = act
    stream = stream_of(state, adam, 10, in_flight)
    stream.lanes = ThreadLanes(UPDATE, patience_s)
    return stream


def test_three_stages_of_three_chunks_run_at_the_same_time() -> None:
    """The store of chunk 0, the update of 1 and the load of 2 meet: one after the other they never could."""
    meet = threading.Barrier(3, timeout=20)
    act = {("store", 0): meet.wait, ("update", 10): meet.wait, ("load", 20): meet.wait}
    stream = held_stream(3, act)
    drive(stream)
    assert isinstance(stream.adam, Held)
    assert stream.adam.most == 3
    assert {span.lane for span in stream.spans()} == set(STAGES)
    assert len(stream.spans()) == 3 * 6


@pytest.mark.parametrize("in_flight", [1, 2, 3, 4])
def test_no_more_chunks_are_in_flight_than_there_are_workspaces(in_flight: int) -> None:
    stream = held_stream(in_flight, {("store", s): lambda: time.sleep(0.002) for s in range(0, 60, 10)})
    drive(stream)
    assert isinstance(stream.adam, Held)
    assert stream.adam.most <= in_flight


# ---- what goes wrong


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_in_any_stage_ends_the_update_with_stage_and_chunk(stage: str, in_flight: int) -> None:
    def fail() -> None:
        raise ValueError("a bad page")

    stream = held_stream(in_flight, {(stage, 30): fail})
    with pytest.raises(EngineError, match=f"optimizer: {stage} of chunk 3 of actor: ValueError: a bad page"):
        drive(stream)
    assert lanes_at_work() == []


def test_a_user_error_in_a_stage_keeps_its_words_and_its_hint() -> None:
    def fail() -> None:
        raise OutOfMemory("no page left", where="device 0", hint="free memory")

    with pytest.raises(EngineError) as refused:
        drive(held_stream(2, {("load", 10): fail}))
    assert str(refused.value) == ("optimizer: load of chunk 1 of actor: device 0: no page left\n    try: free memory")


@pytest.mark.parametrize("stage", ["load", "store"])
def test_a_stage_that_hangs_is_given_up(stage: str) -> None:
    """The thread stays where it hangs, as a daemon; whoever waits for it does not."""
    forever = threading.Event()
    stream = held_stream(2, {(stage, 20): forever.wait}, patience_s=0.4)
    with pytest.raises(EngineError, match=f"{stage} of chunk 2 of actor has not ended for 0.4 s"):
        drive(stream)
    forever.set()
    assert lanes_at_work() == []


# ---- in a run


def with_in_flight(plan: Plan, in_flight: int) -> Plan:
    """The same steps with other workspaces: what overlaps is not in the program."""
    job = Job.model_validate(plan.job)
    changed = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"in_flight": in_flight})})
    return plan.model_copy(update={"job": changed.model_dump(mode="json")})


def test_a_run_has_the_same_bits_with_any_number_of_chunks_in_flight() -> None:
    plan, found = tight_plan(), {}
    assert len([s for s in plan.programs["train"] if isinstance(s, UpdateChunk)]) > 3
    for in_flight in (1, 3):
        run = InThreads(with_in_flight(plan, in_flight), {"reward": luck})
        for iteration in (0, 1):
            run.step(iteration)
        update = run.states[TRAIN].optimizer("actor")
        found[in_flight] = (update.digests(), run.train.digests())
        rows = [row for row in run.log.objects(plan) if row.object == "optimizer.workspace"]
        spans = update.spans
        run.close()
    assert found[1] == found[3]
    assert 0 < max(row.measured for row in rows) <= plan.object("optimizer.workspace").bytes
    _of_every_chunk(plan, spans)
    assert lanes_at_work() == []


def _of_every_chunk(plan: Plan, spans: tuple[LaneSpan, ...]) -> None:
    chunks = range(plan.summary.chunks.optimizer.count)
    assert {s.text for s in spans} == {f"{stage} of chunk {i} of actor" for stage in STAGES for i in chunks}


def test_an_error_in_a_stage_of_a_run_names_it_and_leaves_nothing_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of chunk 1 fails while others are loaded and updated; no chunk is published."""
    plan = tight_plan()
    first = next(s for s in plan.programs["train"] if isinstance(s, UpdateChunk) and s.index == 1)
    store = ChunkedAdam.store

    def fail(self: ChunkedAdam, work: Any, start: int, stop: int) -> None:
        if start == first.start:
            raise OSError("no page for a weight")
        store(self, work, start, stop)

    monkeypatch.setattr(ChunkedAdam, "store", fail)
    run = InThreads(plan, {"reward": luck})
    with pytest.raises(EngineError, match="store of chunk 1 of actor: OSError: no page for a weight"):
        run.step(0)
    assert lanes_at_work() == []
    run.close()


def test_lanes_tell_what_they_begin_and_that_it_is_done() -> None:
    """Each lane: its stage of chunk 0, nothing, its stage of chunk 1, nothing; never two stages at a time."""
    slabs, state = flat_layout(named([10])), fresh_state(10, torch.float32)
    fill_grad(state, 0)
    told: list[tuple[str, str]] = []
    stream = stream_of(state, ChunkedAdam(CONFIG, slabs, state, {}), 5, 2)
    stream.lanes = ThreadLanes(UPDATE, 20, lambda lane, text: told.append((lane, text)))
    drive(stream)
    for stage in STAGES:
        own = [text for lane, text in told if lane == stage]
        assert own == [f"{stage} of chunk 0 of actor", "", f"{stage} of chunk 1 of actor", ""]


def test_the_cast_goes_straight_into_the_snapshot() -> None:
    """Storing a chunk allocates nothing: no copy of the weights stands between master and shared pages."""
    state, snapshot = fresh_state(1000, torch.float32), {"p0": torch.zeros(1000, dtype=torch.bfloat16)}
    adam = ChunkedAdam(CONFIG, flat_layout(named([1000])), state, snapshot)
    (room,) = ring([(0, 1000)], 1, torch.float32)
    with LiveBytes() as live:
        adam.store(adam.load(0, 1000, 1.0, room), 0, 1000)
    assert live.peak_bytes == 0
    assert torch.equal(snapshot["p0"], state.master.bfloat16())


def test_every_stage_is_a_slice_of_a_lane_in_the_trace() -> None:
    """steps and windows are tracks 1 and 2; load, update and store come behind them."""
    spans = tuple(LaneSpan(stage, f"{stage} of chunk 0 of actor", 10 * i, 10 * i + 5) for i, stage in enumerate(STAGES))
    step = Span(TRAIN, 3, UpdateChunk(window="P3", role="actor", index=0, start=0, stop=1), 0, 40)
    trace = Trace([TRAIN])
    events = [*trace.names(), *trace.steps([step]), *trace.lanes({TRAIN: EngineReport(lanes=spans)})]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {1: "steps", 2: "windows", 3: "load", 4: "update", 5: "store"}
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] > 2]
    assert slices == [(3 + i, f"{stage} of chunk 0 of actor", i / 100, 0.005) for i, stage in enumerate(STAGES)]
