"""Calibration without a GPU: the grid, the order of questions, the file; stations are simulated, or they echo.

fake GPU   a decode step takes 4 ms + 50 us a response, twice as long beside prefixes on all SMs
           prefixes run 60,000 tokens a second on all SMs, in proportion on fewer, half of that beside decode
"""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from rollplex.backends.cuda.bench import Repeated, serve
from rollplex.backends.cuda.machine import Card
from rollplex.backends.cuda.mps import Mps
from rollplex.backends.cuda.peers import Alone
from rollplex.backends.cuda.proxy import Proxy, RankShape, ring
from rollplex.cli import app
from rollplex.ir.calibration import Shape, read_calibration
from rollplex.ir.errors import EngineError, JobError, RunError
from rollplex.ir.job import Job, load_job
from rollplex.runtime.calibrate import command, side
from rollplex.runtime.calibrate.command import check_gpu, check_job, check_place, check_sms, write_whole, written
from rollplex.runtime.calibrate.grid import Grid
from rollplex.runtime.calibrate.measure import Measurement
from rollplex.runtime.calibrate.side import ProcessSide

JOB = """\
model: Qwen2.5-VL-3B
cluster: {gpu: H200, gpus_per_node: 1, host_memory_gb: 128}
roles:
  actor:
    train: {engine: megatron}
    rollout: {engine: vllm, kv_cache_gib: 20}
  reference:
    score: {engine: megatron}
workload: {prompts: 4, group: 8, prompt_tokens: 6000, response_tokens: 512, response_median: 300}
"""
SMS = 132
SOLVED = "sharing: {kind: solved}\n"
FACTS = {"torch": "2.11.0", "cuda": "13.0", "device": "NVIDIA H200"}


def job_of(folder: Path, *overrides: str) -> Job:
    path = folder / "job.yaml"
    path.write_text(JOB)
    return load_job(path, overrides)


# ---- the grid


def test_the_grid_is_of_the_jobs_shapes(tmp_path: Path) -> None:
    grid = Grid.of(job_of(tmp_path), SMS)
    assert grid.batches == (1, 4, 16, 32)
    assert grid.chunks == (1024, 2048, 6000)
    assert grid.sms == (32, 64, 80, 96, 132)
    assert grid.contexts == (6000, 6512)
    assert 6000 in grid.gemm_tokens
    assert grid.figures == 5 + 3 + 3 + 8 + 3 + 60


def test_the_budget_is_shared_out_to_points(tmp_path: Path) -> None:
    """67 points and what turning to each takes, in what starting up leaves; none is shorter than half a second."""
    job = job_of(tmp_path)
    assert Grid.of(job, SMS, 600).point_s == 2.0
    assert Grid.of(job, SMS).point_s == pytest.approx((240 - 70) / 67 - 0.6)
    assert Grid.of(job, SMS, 10).point_s == 0.5


def test_a_quick_grid_has_few_points(tmp_path: Path) -> None:
    grid = Grid.of(job_of(tmp_path), SMS, quick=True)
    assert (grid.batches, grid.chunks, grid.sms, grid.point_s) == ((4, 32), (6000,), (64, 80, 132), 0.5)


def test_small_prompts_and_small_gpus_have_their_own_points(tmp_path: Path) -> None:
    grid = Grid.of(job_of(tmp_path, "workload.prompt_tokens=1200", "workload.prompts=1", "workload.group=1"), 20)
    assert (grid.batches, grid.chunks, grid.sms) == ((1,), (1200,), (8, 20))


# ---- what is measured


@dataclass
class World:
    """The fake GPU: its clock, and what runs on it."""

    now: float = 0.0
    batch: int = 0
    sms: int = 0
    fails_at: int = 10**9
    asked: list[str] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return (4e-3 + 50e-6 * self.batch) * (1 + self.sms / SMS)

    def tokens_per_s(self) -> float:
        return 60_000 * self.sms / SMS * (0.5 if self.batch else 1.0)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeSide:
    """One side of it. The second of two ranks is a tenth slower at everything; what both do ends with it."""

    world: World
    decoding: bool
    ranks: int = 1
    mark_s: float = 0.0
    tokens: int = 0

    @property
    def facts(self) -> list[dict[str, Any]]:
        return [{"sms": SMS, **FACTS}] * self.ranks

    def wait(self) -> None:
        """It is ready."""

    def ask(self, what: str, **about: Any) -> list[dict[str, Any]]:
        found = self._answer(what, **about)
        return [
            found,
            *({name: self._slower(name, value) for name, value in found.items()} for _ in range(1, self.ranks)),
        ]

    def _slower(self, name: str, value: float) -> float:
        if name in ("count", "nbytes"):
            return value
        return value / 1.1 if name.endswith(("tflops", "gb_s")) else 1.1 * value

    def _answer(self, what: str, **about: Any) -> dict[str, Any]:
        world = self.world
        world.asked.append(what)
        if len(world.asked) >= world.fails_at:
            raise EngineError("the GPU fell off the bus")
        match what:
            case "gemm" | "attention":
                return {"tflops": 500.123456}
            case "sum":
                nbytes = about["tokens"] * 4096
                return {"nbytes": nbytes, "seconds": 2e-5 + nbytes / 300e9}
            case "hbm":
                return {"gb_s": 3900.0}
            case "link":
                return {"to_device_gb_s": 55.0, "to_host_gb_s": 54.0, "both_gb_s": 50.5}
            case "pages":
                return {"create_s": 1e-4, "map_s": 2e-4, "unmap_s": 5e-4, "pin_s": 0.55}
            case "decode":
                world.batch = about["batch"]
            case "prefix":
                self.tokens, world.sms = about["tokens"], about["sms"] or SMS
            case "end" if self.decoding:
                world.batch = 0
            case "end":
                world.sms = 0
            case "mark":
                self.mark_s = world.now
            case "read":
                each = world.step_s if self.decoding else self.tokens / world.tokens_per_s()
                count = max(1, int((world.now - self.mark_s) / each))
                return {"count": count, "seconds": count * each}
        return {}


def measurement(world: World, grid: Grid, told: list[str], ranks: int = 1) -> Measurement:
    sides = (FakeSide(world, True, ranks), FakeSide(world, False, ranks))
    return Measurement(*sides, grid, lambda what, figure: told.append(f"{what}: {figure}"), sleep=world.sleep)


def test_what_is_measured_is_what_the_gpu_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure of the file, and of the surface that is made of it, is the fake's; it is told as it comes."""
    monkeypatch.setattr(command, "driver_version", lambda: "580")
    job, world, told = job_of(tmp_path), World(), []
    grid = Grid.of(job, SMS)
    run = measurement(world, grid, told)
    with written(run.found, grid, "H200", job, FACTS, tmp_path / "h200.json"):
        run.run()
    assert len(told) == grid.figures
    assert "batch 16 beside chunks of 6000 on 64 SMs: 7.13 ms a step (1.48x), prefix 14545 tokens/s (0.24x)" in told
    found = read_calibration(tmp_path / "h200.json")
    assert found.versions["driver"] == "580"
    assert found.shape == Shape.of(job)
    assert found.step_s(16, 6000) == pytest.approx(4.8e-3)
    surface = found.surface
    assert surface
    assert len(surface.rows) == 60
    for batch in grid.batches:
        for sms in grid.sms:
            beside = surface.beside(batch, 6000, sms)
            assert beside.slower == pytest.approx(1 + sms / SMS, rel=1e-3)
            assert beside.rate == pytest.approx(0.5 * sms / SMS, rel=1e-3)
    assert load_job(tmp_path / "job.yaml", ["cluster.calibration=h200.json", "sharing.kind=solved"]).cluster.calibration


def test_nothing_is_lost_when_it_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the rates there is a file; its surface has the batches that were measured whole."""
    monkeypatch.setattr(command, "driver_version", lambda: "580")
    job, out = job_of(tmp_path), tmp_path / "h200.json"
    grid = Grid.of(job, SMS)
    whole = World()
    measurement(whole, grid, []).run()
    for fails_at, batches in ((5, None), (40, None), (len(whole.asked) - 20, (1, 4, 16))):
        out.unlink(missing_ok=True)
        run = measurement(World(fails_at=fails_at), grid, [])
        with pytest.raises(EngineError, match="fell off"), written(run.found, grid, "H200", job, FACTS, out):
            run.run()
        if fails_at == 5:
            assert not out.exists()
            continue
        surface = read_calibration(out).surface
        assert (surface.batches if surface else None) == batches


def test_the_command_writes_a_file_that_its_job_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the terminal to the file, with nothing faked but the GPU; the job may name the file before it is there."""
    world = World()
    monkeypatch.setattr(command, "driver_version", lambda: "580")
    monkeypatch.setattr(command, "cards", lambda: [Card("0", "GPU-1", "NVIDIA H200", 1 << 30)])
    monkeypatch.setattr(command.Mps, "running", lambda: nullcontext(Mps(tmp_path, "", owned=False)))
    monkeypatch.setattr(command, "_side", lambda _, name, *__: nullcontext(FakeSide(world, name == "decode")))
    monkeypatch.setattr(command, "Measurement", partial(Measurement, sleep=world.sleep))
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("host_memory_gb: 128", "host_memory_gb: 128, calibration: h200.json") + SOLVED)
    told = CliRunner().invoke(app, ["calibrate", str(path), "--out", str(tmp_path / "h200.json"), "--quick"])
    assert told.exit_code == 0, told.output
    assert "measuring  decode batches 4 32  prefix chunks 6000  SMs 64 80 132" in told.output
    assert "batch 4 beside chunks of 6000 without a partition" in told.output
    job = load_job(path)
    assert job.cluster.calibration
    assert f"6 points beside each other, digest {job.cluster.calibration.digest}" in told.output


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    out = tmp_path / "h200.json"
    write_whole(out, "a")
    write_whole(out, "b")
    assert out.read_text() == "b"
    assert os.listdir(tmp_path) == ["h200.json"]
    with pytest.raises(RunError, match="cannot write the calibration"):
        write_whole(tmp_path / "none" / "x.json", "a")


def test_the_slowest_rank_is_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks the second is a tenth slower: rates are its, and what is summed over them is in the file."""
    monkeypatch.setattr(command, "driver_version", lambda: "580")
    cut = ("cluster.gpus_per_node=2", "roles.actor.train.tensor_parallel=2")
    job, told = job_of(tmp_path, *cut), []
    grid = Grid.of(job, SMS)
    run = measurement(World(), grid, told, ranks=2)
    with written(run.found, grid, "H200", job, FACTS, tmp_path / "h200.json"):
        run.run()
    assert len(told) == grid.figures
    assert grid.sum_tokens == grid.gemm_tokens
    found = read_calibration(tmp_path / "h200.json")
    assert found.gemm_flops_per_s(2048) == pytest.approx(500.123456e12 / 1.1, rel=1e-4)
    assert found.link.both_gb_s == pytest.approx(50.5 / 1.1, rel=1e-4)
    assert found.pages.map_s == pytest.approx(2.2e-4)
    assert found.step_s(16, 6000) == pytest.approx(1.1 * 4.8e-3)
    assert found.exchange
    assert found.exchange.stretches
    assert found.exchange.sum_s(6000 * 4096) == pytest.approx(1.1 * (2e-5 + 6000 * 4096 / 300e9), rel=1e-4)
    assert "sum over ranks, 6000 tokens: 0.112 ms" in told
    assert found.surface
    assert found.surface.decode[0].seconds == pytest.approx(1.1 * 4.05e-3)
    assert load_job(tmp_path / "job.yaml", [*cut, "cluster.calibration=h200.json", "sharing.kind=solved"])


def test_two_lengths_that_ranks_round_up_to_one_are_one_sum(tmp_path: Path) -> None:
    """A prompt of 2047 tokens is cut into two stretches of 1024, as one of 2048 is: a file has each size once."""
    grid = replace(Grid.of(job_of(tmp_path), SMS), sum_tokens=(2048, 2048, 8192))
    run = measurement(World(), grid, [], ranks=2)
    run.sums()
    assert [row.nbytes for row in run.found.sums] == [2048 * 4096, 8192 * 4096]


# ---- what is refused


def test_another_gpu_than_the_jobs_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert check_gpu(job, "NVIDIA H200") == "H200"
    for other in ("NVIDIA H20", "NVIDIA H100 80GB HBM3"):
        with pytest.raises(RunError, match=f"the job's GPU is H200, this machine has {other}"):
            check_gpu(job, other)
    with pytest.raises(RunError, match="no GPU that CUDA sees"):
        check_gpu(job, "")
    assert check_gpu(job_of(tmp_path, "cluster.gpu=A100-80"), "NVIDIA A100-SXM4-80GB") == "A100-80"


def test_a_gpu_with_other_sms_than_the_table_is_refused(tmp_path: Path) -> None:
    """Before anything is measured: a slice of a GPU, or another make of it."""
    job = job_of(tmp_path)
    check_sms(job, "NVIDIA H200", 132)
    with pytest.raises(RunError) as caught:
        check_sms(job, "NVIDIA H200 MIG 3g.71gb", 60)
    assert str(caught.value) == (
        "cluster.gpu: NVIDIA H200 MIG 3g.71gb has 60 SMs, the table of GPUs has H200 with 132\n"
        "    try: calibrate a whole GPU (no MIG slice), of the make that `rollplex gpus` lists"
    )


def test_a_job_that_says_nothing_of_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cluster\.gpu is cpu, and a GPU is calibrated"):
        check_job(load_job("examples/jobs/shapes_host.yaml"))
    with pytest.raises(JobError, match="has experts, and what stands for a model here has none"):
        check_job(load_job("examples/jobs/gspo_30b_a3b_h800x16.yaml"))
    with pytest.raises(RunError, match=r"it is a directory\n.*try: name a file: .*gpu.json"):
        check_place(tmp_path)
    with pytest.raises(RunError, match="cannot write into"):
        check_place(tmp_path / "none" / "x.json")


# ---- processes


ECHO = """\
import json, sys
print(json.dumps({"sms": 132}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["ask"] == "die": print("out of luck", file=sys.stderr); sys.exit(3)
    if asked["ask"] == "fail": asked = {"error": "RuntimeError: CUDA error"}
    print("not json" if asked.get("ask") == "babble" else json.dumps(asked), flush=True)
"""


def test_a_station_answers_fails_and_dies() -> None:
    """Each by a message that has what was asked, and the last lines of its log."""
    with ProcessSide.started("prefix", {0: [sys.executable, "-c", ECHO]}, os.environ) as process:
        process.wait()
        assert process.facts == [{"sms": 132}]
        assert process.ask("gemm", tokens=5) == [{"ask": "gemm", "tokens": 5}]
        with pytest.raises(EngineError, match="the prefix side fail: RuntimeError: CUDA error"):
            process.ask("fail")
        with pytest.raises(EngineError, match="was asked for babble and said 'not json"):
            process.ask("babble")
        with pytest.raises(EngineError, match=r"has ended with status 3, asked for die x=1\n    out of luck"):
            process.ask("die", x=1)
        with pytest.raises(EngineError, match="has ended before it was asked for gemm"):
            process.ask("gemm")
    assert process.stations[0].process.returncode == 3


def test_a_station_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side, "ANSWER_S", 0.2)
    monkeypatch.setattr(side, "END_S", 0.5)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    given_up = pytest.raises(EngineError, match=r"has not answered to be ready for 0\.2 s")
    with ProcessSide.started("decode", {0: command}, os.environ) as process, given_up:
        process.wait()
    assert process.stations[0].process.returncode == -9


class Clock:
    """A second a look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Counted(Repeated):
    """Begins work that ends by itself after some turns, so that what it is asked next is answered for sure."""

    def begin(self) -> dict[str, Any]:
        def work() -> None:
            done.append(1)

        done: list[int] = []
        self.work = work
        return {}

    def end(self) -> dict[str, Any]:
        self.work = None
        return {}


def test_a_bench_works_between_questions() -> None:
    """What was begun is done once at least between a mark and a reading; an unknown question is answered, too."""
    asked = [{"ask": name} for name in ("begin", "mark", "read", "end", "nonsense")]
    answers = io.StringIO()
    serve(Counted(Alone(), Clock()), iter([json.dumps(a) for a in asked]), answers)
    begun, marked, read, ended, wrong = (json.loads(line) for line in answers.getvalue().splitlines())
    assert (begun, marked, ended) == ({}, {}, {})
    assert read["count"] >= 1
    assert read["seconds"] > 0
    assert wrong["error"].startswith("AttributeError")


# ---- what stands for the model

SMALL = RankShape(3, 16, 4, 2, 8, 24, 64, torch.float64)


def test_a_ranks_shape_is_its_part_of_the_model(tmp_path: Path) -> None:
    """Qwen2.5-VL-3B's language model has 3,085,938,688 parameters: those of the linears, and the tied embedding."""
    job = job_of(tmp_path)
    whole = RankShape.of(Shape.of(job), 1)
    small = job.spec.hidden * (2 * job.spec.layers + 1)  # norms
    biases = job.spec.layers * (whole.heads + 2 * whole.kv_heads) * whole.head_dim
    embedding = job.spec.vocab * job.spec.hidden
    assert whole.layers * whole.layer_elements + small + biases + embedding == job.spec.language_parameters
    half = RankShape.of(Shape.of(job), 4)
    assert (half.heads, half.kv_heads, half.ffn, half.vocab) == (4, 1, 2752, 37984)


def test_the_proxy_decodes_what_its_prefix_computes() -> None:
    """Of a token that sees itself alone both are the same, whichever side runs the layers."""
    torch.manual_seed(0)
    proxy = Proxy(SMALL, torch.device("cpu"), 1e9, decoding=True)
    assert proxy.head is not None
    tokens = proxy.hidden(1)
    cache = proxy.cache(1, 1, 1e9)
    logits = proxy.decode(tokens, cache)
    assert logits.shape == (1, 64)
    expected = F.linear(F.rms_norm(proxy.prefix(tokens), (16,)), proxy.head)
    torch.testing.assert_close(logits, expected)


def test_a_ring_holds_what_there_is_room_for() -> None:
    assert [ring(36, 10.0, room) for room in (1e9, 100.0, 5.0)] == [36, 10, 2]
    proxy = Proxy(SMALL, torch.device("cpu"), 1.0)
    assert proxy.ring == 2
    assert proxy.prefix(proxy.hidden(5)).shape == (5, 16)
    sizes = [tuple(found.shape) for found in proxy.linears(2, proxy.inputs(5))]
    assert sizes == [(5, 64), (5, 16), (5, 48), (5, 16)]
    assert len(proxy.cache(2, 3, 1e9)) == 3
