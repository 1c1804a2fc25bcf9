"""A snapshot whose pages go at the optimizer barrier and come back chunk by chunk: planned, run, the same bits.

snapshot     ########|                 theta-quiet
                     |  ## #### ####### ########   pages that chunks 0 .. 3 write
gradients    ########|#### ###  ##      #          what is left of them
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from runtime_threads import ROLLOUT, TRAIN, InThreads
from runtime_tiny import CONFIG, luck, tiny_job, tiny_plan

from rollplex import api
from rollplex.backends.megatron import memory as megatron_memory
from rollplex.backends.megatron.memory import Slab
from rollplex.backends.megatron.names import Stored, parameters
from rollplex.backends.memory.fds import close_all
from rollplex.ir.checker import check_plan
from rollplex.ir.errors import JobError, PlanError
from rollplex.ir.job import Job
from rollplex.ir.job_checks import check_job
from rollplex.ir.job_file import change_job
from rollplex.ir.plan import Plan
from rollplex.ir.releasing import stretches
from rollplex.ir.steps import Map, MapPart, Step, Unmap, UnmapPart, UpdateChunk
from rollplex.runtime.executor import execute
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.run import RunResult, run_plan
from rollplex.show.html.page import html_page
from rollplex.show.page import plan_page

torch.set_num_threads(1)
STEPS = 2
SNAPSHOT, GRADIENTS = "actor.snapshot", "actor.gradients"
MODEL = {**CONFIG, "num_hidden_layers": 8, "intermediate_size": 256}
"""Layers enough that a chunk writes some of them, and larger than the activations beside them."""


def plan_of(snapshot: str = "release", **changes: Any) -> Plan:
    """A frozen tower, so that the language model is all of the update."""
    roles = {**tiny_job().model_dump()["roles"]}
    rollout = {**roles["actor"]["rollout"], "kv_cache_gib": "512 KiB", "runtime_gib": "512 KiB"}
    roles["actor"] = {**roles["actor"], "freeze": ["vision"], "prefix_saved": "dropped", "rollout": rollout}
    sections = {
        "model": {"config": MODEL},
        "optimizer": {"snapshot": snapshot, "chunks": 4},
        "roles": roles,
        **changes,
    }
    return tiny_plan(**sections)


def short(snapshot: str) -> Plan:
    """No room for gradients at the host, nor beside snapshot and workspaces on the device."""
    cluster = {"capacity_gib": "5000 KiB", "host_memory_gb": 0.0042, "pinned_share": 1.0}
    return plan_of(snapshot, cluster=cluster)


def update_bytes(plan: Plan) -> int:
    return next(w.hbm_bytes for w in plan.summary.windows if w.name == "P3 update")


def released(plan: Plan) -> bool:
    return any(isinstance(s, Unmap) and s.object == SNAPSHOT for s in plan.programs["train"])


# ---- the plan


def test_auto_keeps_what_fits() -> None:
    assert not released(plan_of("auto"))
    assert plan_of("auto").programs == plan_of("keep").programs


def test_a_job_fits_by_a_release_alone_and_auto_finds_it() -> None:
    kept, auto = short("keep"), short("auto")
    assert not kept.feasible
    assert kept.infeasible is not None
    assert kept.infeasible.window == "P3 update"
    assert "optimizer.snapshot=release" in [r.change for r in kept.infeasible.remedies]
    assert auto.feasible
    assert released(auto)
    assert auto.programs == short("release").programs


def test_what_is_counted_is_what_comes_and_what_is_left() -> None:
    """By hand: chunks are a quarter of the parameters, pages go with the layer that a chunk ends in."""
    kept, found = plan_of("keep"), plan_of("release")
    own = [end for end, _ in stretches(Job.model_validate(found.job))]
    total, each = own[-1], found.summary.chunks.optimizer.elements
    written = [next(end for end in own if end >= min(total, stop)) for stop in range(each, total + each, each)]
    written[-1] = found.object(SNAPSHOT).bytes // 4
    most = 0
    for k, end in enumerate(written):
        pages = min(-(-end * 4 // 4096) * 4096, found.object(SNAPSHOT).bytes)
        left = found.object(GRADIENTS).bytes - k * each * 4 // 4096 * 4096
        most = max(most, pages + left)
    both = found.object(SNAPSHOT).bytes + found.object(GRADIENTS).bytes
    assert most < 0.75 * both
    assert update_bytes(kept) - update_bytes(found) == both - most


def test_the_checker_counts_what_has_come_and_what_is_left() -> None:
    """A byte less than the fullest moment is too little, and that moment is one of the update."""
    plan = short("release")
    assert plan.summary.peak_window == "P3 update"
    for capacity, told in ((update_bytes(plan), []), (update_bytes(plan) - 1, ["P3 update"])):
        summary = plan.summary.model_copy(update={"capacity_bytes": capacity})
        found = check_plan(plan.model_copy(update={"summary": summary}))
        assert [v.where.split(" (")[0] for v in found if v.kind == "capacity"] == told


def test_it_costs_the_seconds_of_its_pages() -> None:
    kept, found = plan_of("keep").summary.times, plan_of("release").summary.times
    assert found.exposed_transfer_s - kept.exposed_transfer_s == pytest.approx(
        plan_of().object(SNAPSHOT).bytes / 2**30 * 2e-3, abs=1.1e-6
    )


def refusal(*overrides: str) -> str:
    job = change_job(tiny_job(), ["cluster.gpus_per_node=1"])
    try:
        found = check_job(change_job(job, ["optimizer.snapshot=release", *overrides]))
    except JobError as error:
        return " ".join(p.what for p in error.problems)
    return " ".join(f.what for f in found)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("schedule=naive",), "under naive nothing is released"),
        (("ablate=[chunked_optimizer]",), "ablate switches chunking off: the update is one chunk"),
        (("ablate=[state_offload]",), "ablate keeps states in HBM"),
        (("roles.actor.lora={rank: 4}",), "actor trains adapters: nothing makes its base again"),
        (("roles.actor.freeze=[language]",), "actor freezes its language model, which has no masters"),
        (("roles.critic={train: {engine: host}}",), "critic is updated too, and may read it"),
        (
            ("cluster.gpus_per_node=2", "roles.actor.train.distributed_optimizer=true"),
            "master weights are cut over the ranks: none makes all of it again",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_snapshot_that_cannot_be_released_is_refused_by_its_reason(overrides: tuple[str, ...], why: str) -> None:
    assert f"the snapshot cannot be released: {why}" in refusal(*overrides)


# ---- where an engine writes


@pytest.mark.parametrize(("train", "rollout"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_layers_end_where_the_engine_has_them(train: int, rollout: int) -> None:
    """In the update's order and in memory, of every slab: Megatron's own parameters, in any order inside of a layer."""
    config = {**MODEL, "num_key_value_heads": 4, "tie_word_embeddings": False}
    roles = {**tiny_job().model_dump()["roles"]}
    section = {"engine": "megatron", "tensor_parallel": train}
    roles["actor"] = {**roles["actor"], "train": section, "rollout": {"engine": "host", "tensor_parallel": rollout}}
    roles["reference"] = {"score": section}
    job = tiny_job(model={"config": config}, roles=roles, cluster={"gpus_per_node": train})
    spec, q, ends = job.spec, train // rollout, stretches(job)
    for rank in range(train):
        order = [p for p in parameters(spec, train, rank, Stored()) if p.part == "language"]
        starts = megatron_memory.starts(order, Slab(rank % q, q))
        flat = list(accumulate(p.numel for p in order))
        assert flat[-1] == ends[-1][0]
        assert megatron_memory.numel(order, Slab(0, q)) == ends[-1][1]
        for own, shared in ends:
            inside = [p for p, stop in zip(order, flat, strict=True) if stop <= own]
            assert max(starts[p.name] + p.numel for p in inside) <= shared


# ---- the run


class Watched:
    """A run in threads; at each chunk the bytes of snapshot and gradients that the device held."""

    def __init__(self, plan: Plan) -> None:
        self.seen: list[dict[str, int]] = []
        self.faulted: list[int] = []
        self.run = InThreads(plan, {"reward": luck}, self._look)
        train, rollout = self.run.train.objects, self.run.rollout.objects
        self.addresses = [o.pages(SNAPSHOT, torch.uint8).data_ptr() for o in (train, rollout)]
        self.inodes = [train.inodes()[SNAPSHOT]]
        for step in range(STEPS):
            self.run.step(step)  # compares the log of the arena with the plan
            self.inodes.append(train.inodes()[SNAPSHOT])
            assert rollout.inodes()[SNAPSHOT] == self.inodes[-1], "the rollout engine maps the new pages"
        assert self.addresses == [o.pages(SNAPSHOT, torch.uint8).data_ptr() for o in (train, rollout)]
        self.digests = self.run.train.digests() | self.run.states[TRAIN].updates["actor"].digests()
        self.shared = [o.shared_digest() for o in (train, rollout)]
        self.run.close()

    def _look(self, process: ProcessId, step: Step) -> None:
        if process == TRAIN and isinstance(step, UpdateChunk):
            live = {e.object: e.nbytes for e in self.run.device.live()}
            self.seen.append({name: live.get(name, 0) for name in (SNAPSHOT, GRADIENTS)})
        first = process == TRAIN and isinstance(step, MapPart) and step.start == 0
        if first and not self.faulted:
            self.faulted = [
                _touched(o.objects.pages(SNAPSHOT, torch.uint8)) for o in (self.run.train, self.run.rollout)
            ]


def _touched(pages: torch.Tensor) -> int:
    """The signal that ends a process which reads the first byte."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os._exit(int(pages[0].item()) * 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@cache
def kept_digests() -> dict[str, str]:
    run = InThreads(plan_of("keep"), {"reward": luck})
    for step in range(STEPS):
        run.step(step)
    found = run.train.digests() | run.states[TRAIN].updates["actor"].digests()
    run.close()
    return found


@pytest.mark.parametrize("schedule", ["rollplex", "serial", "streamed"])
def test_the_bits_are_those_of_a_snapshot_that_stays(schedule: str) -> None:
    """Weights, masters and moments behind two steps; both engines have one physical copy, at the same addresses."""
    found = Watched(plan_of(schedule=schedule))
    assert found.digests == kept_digests()
    assert found.shared[0] == found.shared[1]
    pages = [set(inodes) for inodes in found.inodes]
    assert not pages[0] & pages[1]
    assert not pages[1] & pages[2]


def test_the_device_holds_what_chunks_have_written_and_will_read() -> None:
    """At every chunk of every step, read off the ledger that both processes share."""
    plan = plan_of()
    found = Watched(plan)
    come = gone = 0
    expected = []
    for step in plan.programs["train"]:
        come += step.stop - step.start if isinstance(step, MapPart) else 0
        gone += step.stop - step.start if isinstance(step, UnmapPart) else 0
        if isinstance(step, UpdateChunk):
            expected.append({SNAPSHOT: come, GRADIENTS: plan.object(GRADIENTS).bytes - gone})
    assert found.seen == expected * STEPS
    assert [e[SNAPSHOT] for e in expected] == sorted({e[SNAPSHOT] for e in expected})
    measured = next(w.measured for w in found.run.log.windows(plan) if w.window == "P3 update")
    assert measured == update_bytes(plan) < update_bytes(plan_of("keep"))


def test_a_use_of_released_pages_faults_in_both_processes() -> None:
    assert Watched(plan_of()).faulted == [-signal.SIGSEGV] * 2


def test_the_job_that_fits_by_a_release_alone_runs_within_its_capacity() -> None:
    run = InThreads(short("auto"), {"reward": luck})
    for step in range(STEPS):
        run.step(step)
    assert run.states[ROLLOUT].produced >= {SNAPSHOT}
    run.close()


@cache
def ranks(snapshot: str, train: int, order: str) -> RunResult:
    """Megatron at TP 1, or at TP 2 beside rollout at TP 1: case 3 is rebuilt in stock order alone."""
    section = {"engine": "megatron", "tensor_parallel": train}
    roles = {**tiny_job().model_dump()["roles"], "reference": {"score": section}}
    roles["actor"] = {**roles["actor"], "train": section}
    heads = {**CONFIG, "num_key_value_heads": 2 * train, "num_attention_heads": 4}
    plan = tiny_plan(
        model={"config": heads},
        roles=roles,
        cluster={"gpus_per_node": train, "capacity_gib": "16 MiB"},
        workload={"prompts": 2 * train},
        layout={"order": order},
        optimizer={"snapshot": snapshot, "chunks": 8},
        run={"verify_weights": True},
    )
    assert released(plan) == (snapshot == "release")
    assert (plan.summary.layout.case3_buffer_bytes > 0) == (order == "stock")
    return run_plan(plan, hosts={"reward": luck}, out_dir=Path(mkdtemp()) / "run")


@pytest.mark.processes
@pytest.mark.xdist_group("released")
@pytest.mark.parametrize(("train", "order"), [(1, "stock"), (2, "stock"), (2, "reindex")])
def test_processes_take_the_same_steps_with_pages_that_are_passed_again(train: int, order: str) -> None:
    """State and final weights to the bit; the rollout engine's digest of its new pages is the trainer's."""
    found, stays = ranks("release", train, order), ranks("keep", train, order)
    assert found.report.memory_as_planned
    assert found.digests == stays.digests
    both = [(r.final / "model.safetensors").read_bytes() for r in (found, stays)]
    assert both[0] == both[1]


def test_a_map_of_what_another_process_owns_says_what_it_is() -> None:
    """By its step, as every other: at the start of a run imports are bound by none."""
    run = InThreads(plan_of(), {"reward": luck})
    state, pages = run.states[ROLLOUT], run.train.objects.handed_out(SNAPSHOT)
    run.meeting.pages[SNAPSHOT] = pages
    with pytest.raises(
        PlanError, match=r"rollout 0.*: map actor.snapshot \(imported\): actor.snapshot is mapped already"
    ):
        execute(state, Map(window="P3 publish", object=SNAPSHOT, imported=True))
    close_all(pages)
    run.close()


def test_the_page_says_that_it_comes_in_parts() -> None:
    lines = [text.plain for text in plan_page(plan_of())]
    (row,) = (line for line in lines if line.startswith("  actor float32 snapshot"))
    assert row.split()[-2:] == ["part*", "hbm*"]
    assert any(line.startswith("* used") and line.endswith("part: comes or goes in parts") for line in lines)
    assert any("in flight, snapshot released and back in 4 parts" in line for line in lines)
    assert not any("in parts" in text.plain for text in plan_page(plan_of("keep")))


def test_the_browsers_page_says_so_too() -> None:
    """The same words and marks, where they belong: the contract's row and legend, the chunks."""
    page, kept = html_page(plan_of()), html_page(plan_of("keep"))
    (row,) = (row for row in page.split("<tr>") if f'title="{SNAPSHOT}:' in row and "at-hbm" in row)
    cells = re.findall(r'class="at-hbm">([^<]*)</td>', row)
    assert cells[-2:] == ["part \u2022", "HBM \u2022"]
    assert "drop: to be made again; part: comes or goes in parts</p>" in page
    assert "in flight, snapshot released and back in 4 parts</dd>" in page
    assert "part: comes" not in kept
    assert "snapshot released" not in kept


def test_another_place_is_priced_beside_the_release() -> None:
    """The job has no room for gradients at the host; in HBM, where the plan has them, nothing is over capacity."""
    moves = {(m.window, m.place): m for m in api.explain(short("auto"), GRADIENTS).moves}
    missing = short("keep").infeasible
    assert missing is not None
    assert moves["P3 update", "host"].over_bytes == missing.shortfall_bytes > 0
