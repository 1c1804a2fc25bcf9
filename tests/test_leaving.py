"""Gradients that leave piece by piece, beside the backward that makes them final: planned, executed, the same bits.

backward     | layer 1 | layer 0 | embedding | tower |
pieces            | 0 | 1 |  2 | ..                    32 of them, let go in this order
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_threads import TRAIN, InThreads
from runtime_tiny import luck, tiny_plan

from rollplex.backends.memory.host import HostDevice
from rollplex.backends.memory.ledger import Ledger
from rollplex.backends.memory.memfd import HostMemory
from rollplex.backends.memory.objects import ObjectStore, StoredObject
from rollplex.backends.memory.pinned import PinnedPool, Place
from rollplex.backends.training.gradients import FlatGradients, leaves
from rollplex.ir.errors import OutOfMemory, PlanError
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Offload, Run
from rollplex.passes.leaving import PIECE_S, Part, exposed_s
from rollplex.runtime.pieces import Pieces
from rollplex.runtime.run import RunResult, run_plan

torch.set_num_threads(1)
STEPS = 2
SHORT, ROOMY = "2500 KiB", "3400 KiB"
"""Capacities for three chunks: one at which gradients must wait at the host, one at which they stay."""


def plan_of(capacity: str, **changes: Any) -> Plan:
    return tiny_plan(**{"optimizer": {"chunks": 3}, "cluster": {"capacity_gib": capacity}, **changes})


def leaving(plan: Plan, role: str = "actor") -> list[Run]:
    return [s for s in plan.programs["train"] if isinstance(s, Run) and s.offloads and s.role == role]


# ---- the plan


def test_gradients_leave_in_pieces_where_the_update_has_no_room_for_them() -> None:
    """The last backward has them, no step offloads them as a whole, and the norm finds them at the host."""
    plan, stays = plan_of(SHORT), plan_of(ROOMY)
    (step,) = leaving(plan)
    assert (step.task, step.microbatch) == ("prefix_backward", 1)
    assert sum(p.stop - p.start for p in step.offloads) == plan.object("actor.gradients").bytes
    assert not [s for s in plan.programs["train"] if isinstance(s, Offload) and s.object == "actor.gradients"]
    (norm,) = (s for s in plan.programs["train"] if isinstance(s, Run) and s.task == "grad_norm")
    assert (norm.reads, norm.streams) == ((), ("actor.gradients",))
    assert plan.object("actor.gradients").residency["P3 update"] == "host"
    assert (leaving(stays), stays.object("actor.gradients").residency["P3 update"]) == ([], "hbm")


def test_what_it_hides_is_told_and_taken_off_the_step() -> None:
    """Against the same plan that lets them go as a whole: the seconds of their way over the link, but for the last."""
    times, job = plan_of(SHORT).summary.times, plan_of(SHORT).job
    nbytes = plan_of(SHORT).object("actor.gradients").bytes
    link_s = nbytes / 10e9  # hardware.py: the host's link
    assert job["cluster"]["gpu"] == "cpu"
    assert 0.5 * link_s < times.hidden_offload_s < link_s
    assert plan_of(ROOMY).summary.times.hidden_offload_s == 0


def simulated(parts: list[Part], pieces: list[tuple[int, int]], rate: float, tick: float) -> float:
    """Seconds behind the backward, by a clock that ticks: bytes become final from the end of each part on."""
    queue, clock, busy, total = list(pieces), 0.0, 0.0, sum(p.seconds for p in parts)
    while queue or busy > 0:
        edges, began = {}, 0.0
        for p in parts:
            done = min(1.0, max(0.0, (clock - began) / p.seconds)) if p.seconds else float(clock >= began)
            edges |= {p: p.stop - done * (p.stop - p.start)}
            began += p.seconds
        if busy <= 0 and queue:
            start, stop = queue[0]
            (part,) = (p for p in parts if p.start <= start < p.stop)
            if edges[part] <= start + 1e-9:
                busy = (stop - start) / rate + PIECE_S
                queue.pop(0)
        clock, busy = clock + tick, busy - tick
    return max(0.0, clock - total)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 8), st.floats(0.02, 0.3)), min_size=1, max_size=2),
    cuts=st.integers(1, 4),
)
def test_what_is_left_behind_the_backward_is_that_of_a_clock(sizes: list[tuple[int, float]], cuts: int) -> None:
    rate, at, parts = 100.0, 0, []
    for nbytes, seconds in sizes:
        parts.append(Part(at, at + nbytes * cuts, seconds))
        at += nbytes * cuts
    pieces = [(start, start + cuts) for p in parts for start in range(p.stop - cuts, p.start - 1, -cuts)]
    found = exposed_s(parts, pieces, SimpleNamespace(link_s=lambda n: n / rate))  # type: ignore[arg-type]
    assert found == pytest.approx(simulated(parts, pieces, rate, 1e-4), abs=2e-4 * (len(pieces) + 2))


# ---- the run


class Watched:
    """A run in threads; `early` are the pieces that were on their way when the backward had ended, step by step."""

    def __init__(self, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        self.early: list[int] = []
        finish = Pieces.finish

        def noted(pieces: Pieces) -> None:
            self.early.append(len(pieces._going))
            finish(pieces)

        monkeypatch.setattr(Pieces, "finish", noted)
        run = InThreads(plan, {"reward": luck})
        for step in range(STEPS):
            run.step(step)  # compares the log of the arena with the plan, piece by piece
        self.metrics = run.states[TRAIN].updates["actor"].metrics
        self.lanes = [span.lane for span in run.states[TRAIN].lanes]
        self.digests = run.train.digests() | run.states[TRAIN].updates["actor"].digests()
        run.close()


@pytest.mark.parametrize("schedule", ["rollplex", "serial", "streamed"])
def test_the_bits_are_those_of_gradients_that_stay(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, master copies, moments and norm; under each schedule pieces leave beside the backward."""
    pieces = Watched(plan_of("2700 KiB" if schedule == "streamed" else SHORT, schedule=schedule), monkeypatch)
    assert pieces.early, "the plan has no pieces"
    assert pieces.lanes.count("offload") == pieces.early[0]
    assert pieces.early == [pieces.lanes.count("square")] * STEPS, "every piece is final before the backward returns"
    stays = Watched(plan_of(ROOMY), monkeypatch)
    assert (stays.early, stays.lanes) == ([], [])
    assert (pieces.digests, pieces.metrics) == (stays.digests, stays.metrics)


def test_a_dropped_prefix_is_run_again_and_leaves_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph is made in the step that lets the gradients go."""
    roles = {**plan_of(SHORT).job["roles"]}
    roles["actor"] = {**roles["actor"], "prefix_saved": "dropped"}
    found = Watched(plan_of(SHORT, roles=roles), monkeypatch)
    assert found.early
    assert found.early == [found.lanes.count("offload")] * STEPS


def test_an_error_of_a_lane_names_the_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollplex.backends.memory.planned import PlannedObjects

    def refuse(self: PlannedObjects, name: str, start: int, stop: int, step: str) -> None:
        raise PlanError("no way out", where="pinned pool", hint="none")

    monkeypatch.setattr(PlannedObjects, "offload_part", refuse)
    run = InThreads(plan_of(SHORT), {"reward": luck})
    with pytest.raises(
        Exception, match=r"gradients of actor: offload of piece 0 of actor.gradients: pinned pool: no way out"
    ):
        run.step(0)


@cache
def two_ranks(engine: str, capacity: str, *, cut: bool) -> RunResult:
    """Two data-parallel ranks; `cut`: each updates a share (ZeRO-1)."""
    roles = {**tiny_plan().job["roles"]}
    roles["actor"] = {**roles["actor"], "train": {"engine": engine, "distributed_optimizer": cut}}
    roles["reference"] = {"score": {"engine": engine}}
    cluster = {"gpus_per_node": 2, "capacity_gib": capacity}
    plan = plan_of(capacity, cluster=cluster, workload={"prompts": 4}, roles=roles)
    assert plan.summary.chunks.microbatch.suffix_responses == 2
    assert bool(leaving(plan)) == (capacity != ALL)
    for step in leaving(plan):
        assert {p.reduce for p in step.offloads} == {"reduce_scatter" if cut else "all_reduce"}
    return run_plan(plan, hosts={"reward": luck}, out_dir=Path(mkdtemp()) / "run")


ALL = "8 MiB"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("engine", "cut", "capacity"),
    [("host", False, "2400 KiB"), ("host", True, "1700 KiB"), ("megatron", False, "2500 KiB")],
    ids=["whole", "shares", "megatron"],
)
def test_two_ranks_reduce_each_piece_before_it_leaves(engine: str, cut: bool, capacity: str) -> None:
    """The sum of two is the same in any cut: metrics and weights are those of one reduction, to the bit."""
    pieces, stays = two_ranks(engine, capacity, cut=cut), two_ranks(engine, ALL, cut=cut)
    for a, b in zip(pieces.report.metrics, stays.report.metrics, strict=True):
        assert {n: a[n] for n in ("reward", "loss", "grad_norm")} == {n: b[n] for n in ("reward", "loss", "grad_norm")}
    both = [(r.final / "model.safetensors").read_bytes() for r in (pieces, stays)]
    assert both[0] == both[1]
    assert [p.object for p in pieces.report.pieces] == ["actor.gradients"]


# ---- what they are made of


def test_the_ends_of_a_graph_are_what_its_backward_adds_to() -> None:
    """`late` is used by nothing that the edge is made of: its gradient is final before the backward begins."""
    early, late = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    edge = torch.autograd.graph.get_gradient_edge((early * 2).exp())
    assert [id(leaf) for leaf in leaves([edge])] == [id(early)]
    gradients, heard = FlatGradients(torch.zeros(6)), list[range]()
    gradients.take(early, gradients.flat[:3])
    gradients.take(late, gradients.flat[3:])
    with gradients.told(heard.append):
        gradients.begins([edge])
        assert heard == [range(3, 6)]
        (early * 2).sum().backward()
    assert heard == [range(3, 6), range(3)]
    assert gradients.flat.tolist() == [2, 2, 2, 0, 0, 0]


def test_parts_of_an_object_leave_one_by_one() -> None:
    """Bytes, pages and the ledger follow; the host copy is valid with the last of them."""
    ledger = Ledger.create("gpu0", 1 << 20, process="train0")
    memory, store = HostMemory(), ObjectStore(ledger, HostDevice())
    pool = PinnedPool(memory, [Place("g", 4096, 3 * 4096)], Ledger.create("host", 1 << 20, process="train0"))
    arena = memory.reserve("g", 3 * 4096, cuts=(4096, 8192))
    store.add([StoredObject("g", "phase-local", 3 * 4096, arena, pool.slot("g"))])
    store.map("g", "map g")
    view = store.view("g", torch.float32)
    view.copy_(torch.arange(3072.0))
    store.offload_part("g", 8192, 12288, "run")
    assert (ledger.total_bytes, store.mapped("g"), store["g"].host_valid) == (8192, True, False)
    assert len(arena.inodes()) == 2
    assert view[:2048].tolist() == list(range(2048))
    with pytest.raises(PlanError, match=r"g: unmap of bytes 8192 to 12288, which are not chunks that are there"):
        arena.unmap_part(8192, 12288)
    with pytest.raises(PlanError, match="g: export of an arena that has lost a part"):
        arena.export()
    store.offload_part("g", 0, 4096, "run")
    store.offload_part("g", 4096, 8192, "run")
    assert (ledger.total_bytes, store.mapped("g"), store["g"].host_valid) == (0, False, True)
    assert arena.inodes() == []
    assert [e.nbytes for e in ledger.events() if e.kind == "release"] == [4096] * 3
    store.fetch("g", "fetch g")
    assert torch.equal(view, torch.arange(3072.0))


def test_parts_of_an_object_come_one_by_one() -> None:
    """Bytes, pages and the ledger follow; it is exported whole, and a part that is there is refused."""
    ledger = Ledger.create("gpu0", 3 * 4096, process="train0")
    memory, store = HostMemory(), ObjectStore(ledger, HostDevice())
    arena, reader = (memory.reserve("w", 3 * 4096, cuts=(4096, 8192)) for _ in range(2))
    store.add([StoredObject("w", "regenerable", 3 * 4096, arena)])
    store.map_part("w", 4096, 8192, "map_part w")
    assert (ledger.total_bytes, store.mapped("w"), len(arena.inodes())) == (4096, True, 1)
    view = arena.view(4096, (1024,), torch.float32)
    view.fill_(3.0)
    with pytest.raises(PlanError, match="w: map of bytes 4096 to 12288, of which some are there already"):
        store.map_part("w", 4096, 12288, "map_part w")
    with pytest.raises(PlanError, match="w: map of bytes 0 to 100, which are not chunks"):
        arena.map_part(0, 100)
    with pytest.raises(PlanError, match="w: export of an arena that has lost a part"):
        arena.export()
    assert ledger.total_bytes == 4096
    for start in (0, 8192):
        store.map_part("w", start, start + 4096, "map_part w")
    assert arena.view(0, (3072,), torch.float32).sum() == 3.0 * 1024
    reader.adopt(arena.export())
    assert reader.inodes() == arena.inodes()
    assert reader.view(4096, (1024,), torch.float32).sum() == 3.0 * 1024
    store.unmap_part("w", 0, 4096, "unmap_part w")
    assert (ledger.total_bytes, len(arena.inodes())) == (8192, 2)
    store.unmap("w", "unmap w")
    assert (ledger.total_bytes, store.mapped("w")) == (0, False)


def test_a_part_that_has_no_room_is_refused_and_nothing_is_mapped() -> None:
    ledger = Ledger.create("gpu0", 4096, process="train0")
    store = ObjectStore(ledger, HostDevice())
    arena = HostMemory().reserve("w", 2 * 4096, cuts=(4096,))
    store.add([StoredObject("w", "regenerable", 2 * 4096, arena)])
    store.map_part("w", 0, 4096, "map_part w")
    with pytest.raises(OutOfMemory, match=r"w asks for 4.00 KiB, but 4.00 KiB of 4.00 KiB are live"):
        store.map_part("w", 4096, 8192, "map_part w")
    assert (ledger.total_bytes, len(arena.inodes())) == (4096, 1)
