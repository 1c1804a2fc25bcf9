"""A calibration of ranks that cut one model: they exchange as engines do, turn together, and none waits for a dead one.

GPU 0   prefix 0 of 2    decode 0 of 1       here: processes on the CPU, joined by gloo
GPU 1   prefix 1 of 2    decode 0 of 1
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from bench_on_cpu import ENVIRONMENT, SMS, command
from processes import ranks
from rich.console import Console
from torch import Tensor

from rollplex.backends.cuda.machine import Card
from rollplex.backends.cuda.peers import Peers
from rollplex.backends.cuda.proxy import Proxy, RankShape
from rollplex.ir.calibration import Shape
from rollplex.ir.errors import EngineError, RunError
from rollplex.ir.job import Job, load_job
from rollplex.runtime.calibrate import side
from rollplex.runtime.calibrate.command import check_gpus, posts
from rollplex.runtime.calibrate.grid import Grid
from rollplex.runtime.calibrate.measure import Measurement
from rollplex.runtime.calibrate.side import ProcessSide
from rollplex.runtime.calibrate.station import GONE_S
from rollplex.watch import CalibrationWatch

JOB = """\
model: Qwen2.5-VL-3B
cluster: {gpu: H200, gpus_per_node: 2, host_memory_gb: 256}
roles:
  actor:
    train: {engine: megatron, tensor_parallel: 2}
    rollout: {engine: vllm, kv_cache_gib: 20}
workload: {prompts: 4, group: 8, prompt_tokens: 6000, response_tokens: 512}
"""
MATCHED = "roles.actor.rollout.tensor_parallel=2"
WHOLE = "roles.actor.train.sequence_parallel=false"


def job_of(folder: Path, *overrides: str) -> Job:
    path = folder / "job.yaml"
    path.write_text(JOB)
    return load_job(path, overrides)


# ---- what ranks exchange

CUT = RankShape(3, 16, 2, 1, 8, 12, 32, torch.float64)
FULL = replace(CUT, heads=4, kv_heads=2, ffn=24, vocab=64)
CPU = torch.device("cpu")


def cut(whole: Proxy, rank: int) -> list[dict[str, Tensor]]:
    """Megatron's parts of all weights: heads, and columns of the feed-forward layer."""
    own = slice(2 * 8 * rank, 2 * 8 * (rank + 1))
    rows = {"q": own, "k": slice(32 + 8 * rank, 40 + 8 * rank), "v": slice(48 + 8 * rank, 56 + 8 * rank)}
    gate, up = slice(12 * rank, 12 * rank + 12), slice(24 + 12 * rank, 36 + 12 * rank)
    return [
        {
            "qkv": torch.cat([layer["qkv"][rows[part]] for part in "qkv"]),
            "o": layer["o"][:, own].contiguous(),
            "gate_up": torch.cat([layer["gate_up"][gate], layer["gate_up"][up]]),
            "down": layer["down"][:, gate].contiguous(),
        }
        for layer in whole.weights
    ]


def forward(tokens: int, pieces: int) -> tuple[Tensor, Tensor]:
    """(what one rank of the default group computes and gathers, what the whole model computes), [tokens, 16]."""
    torch.manual_seed(0)
    whole, rank = Proxy(FULL, CPU, 1e9), torch.distributed.get_rank()
    hidden, exchange = whole.hidden(tokens), Peers(2, pieces)
    part = Proxy(CUT, CPU, 1e9, exchange=exchange)
    part.weights = cut(whole, rank)
    own = hidden.chunk(pieces)[rank] if pieces > 1 else hidden
    return exchange.gathered(part.prefix(own)), whole.prefix(hidden)


@pytest.mark.processes
@pytest.mark.parametrize("pieces", [1, 2])
def test_ranks_compute_what_the_whole_model_does(pieces: int) -> None:
    """By all-reduce, and by reduce-scatter and all-gather of stretches: the same hidden states on every rank."""
    for found, expected in ranks(2).run(forward, 10, pieces):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def decoded() -> tuple[Tensor, Tensor]:
    """(logits of one rank's rows, the same rows of the whole model's), [3, 32]."""
    torch.manual_seed(0)
    whole, rank = Proxy(FULL, CPU, 1e9, decoding=True), torch.distributed.get_rank()
    cache, hidden = whole.cache(3, 5, 1e9), whole.hidden(3)
    part = Proxy(CUT, CPU, 1e9, decoding=True, exchange=Peers(2, 1))
    assert whole.head is not None
    part.weights, part.head = cut(whole, rank), whole.head[32 * rank : 32 * rank + 32]
    own = [(k[:, rank : rank + 1].clone(), v[:, rank : rank + 1].clone()) for k, v in cache]
    return part.decode(hidden, own), whole.decode(hidden, cache)[:, 32 * rank : 32 * rank + 32]


@pytest.mark.processes
def test_ranks_decode_what_the_whole_model_does() -> None:
    for found, expected in ranks(2).run(decoded):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def compared(pieces: int) -> tuple[list[int], int]:
    """What ranks agree on that have heard different numbers of questions, and how often each turned."""
    turns: list[int] = []
    exchange, rank = Peers(2, pieces), torch.distributed.get_rank()
    heard = [(0, 0), (1, 0), (2, 1), (1, 1)]
    return [exchange.agreed(h[rank], lambda: turns.append(1)) for h in heard], len(turns)


@pytest.mark.processes
def test_ranks_answer_what_all_have_heard() -> None:
    """None answers, and ends its work, while another begins a turn that needs it."""
    assert ranks(2).run(compared, 1) == [([0, 0, 1, 1], 4)] * 2


# ---- who is where


def test_a_side_has_a_rank_on_every_gpu(tmp_path: Path) -> None:
    """Two engines of one rank beside a trainer of two; one engine of two where rollout is cut as well."""
    job = job_of(tmp_path, "run.devices=[3,1]")
    prefix, decode = (list(posts(job, name, (3, 1), tmp_path)) for name in ("prefix", "decode"))
    assert [(p.gpu, p.rank, p.tp, p.stretches) for p in prefix] == [(3, 0, 2, True), (1, 1, 2, True)]
    assert {p.meeting for p in prefix} == {str(tmp_path / "prefix-0")}
    assert [(p.gpu, p.rank, p.tp, p.stretches) for p in decode] == [(3, 0, 1, False), (1, 0, 1, False)]
    matched = list(posts(job_of(tmp_path, MATCHED, WHOLE), "decode", (0, 1), tmp_path))
    assert [(p.rank, p.tp, p.meeting) for p in matched] == [(r, 2, str(tmp_path / "decode-0")) for r in (0, 1)]
    assert not any(p.stretches for p in posts(job_of(tmp_path, WHOLE), "prefix", (0, 1), tmp_path))


def card(name: str = "NVIDIA H200") -> Card:
    return Card("0", "GPU-1", name, 1 << 30)


def test_gpus_that_are_not_there_are_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert check_gpus(job, [card(), card(), card()]) == ("H200", (0, 1))
    assert check_gpus(job_of(tmp_path, "run.devices=[2,0]"), [card(), card("NVIDIA L40"), card()]) == ("H200", (2, 0))
    with pytest.raises(RunError) as caught:
        check_gpus(job, [card()])
    assert str(caught.value) == (
        "GPU: TP 2 trains and TP 1 rolls out: 2 GPUs are measured together, CUDA devices 0, 1, and CUDA sees 1 here\n"
        "    try: a machine with as many, run.devices, CUDA_VISIBLE_DEVICES, or a smaller tensor_parallel"
    )
    with pytest.raises(RunError, match="the job's GPU is H200, this machine has NVIDIA H100"):
        check_gpus(job, [card(), card("NVIDIA H100 80GB HBM3")])
    with pytest.raises(RunError, match="this machine has no GPU that CUDA sees"):
        check_gpus(job, [])
    with pytest.raises(RunError) as caught:
        check_gpus(job_of(tmp_path, "run.devices=[0,0]"), [card(), card()])
    assert str(caught.value) == (
        "run.devices: TP 2 trains and TP 1 rolls out: 2 GPUs are measured together, and run.devices names 0, 0: "
        "each rank has its own\n    try: leave run.devices out, or name a GPU once"
    )


def test_the_page_says_how_many_gpus_are_measured(tmp_path: Path) -> None:
    page = io.StringIO()
    with CalibrationWatch(Console(file=page, width=120)) as watch:
        watch.begin(Grid.of(job_of(tmp_path), SMS, quick=True))
    assert page.getvalue() == "measuring  2 GPUs  decode batches 4 16  prefix chunks 6000  SMs 64 80 132\n"


# ---- who is to blame

PART = """\
import json, sys, time
print("{}", flush=True)
for line in sys.stdin:
    if sys.argv[1] == "waits": time.sleep(60)
    print(json.dumps({"error": sys.argv[1], "peer": sys.argv[1] == "lost"}), flush=True)
"""
BLAMED = {
    ("waits", "fails"): r"the prefix side of GPU 5 x: fails\n    try.*\n"
    r"meanwhile: the prefix side of GPU 3 has not answered x for 0\.\d+ s$",
    ("lost", "fails"): r"the prefix side of GPU 5 x: fails\n    try.*$",
    ("lost", "waits"): r"the prefix side of GPU 5 has not answered x for 0\.\d+ s\n    try.*$",
    ("fails", "fails"): r"(calibrate: the prefix side of GPU [35] x: fails\n    try.*\n?){2}$",
    ("lost", "lost"): r"(calibrate: the prefix side of GPU [35] x: lost\n    try.*\n?){2}$",
}


@pytest.mark.parametrize("does", BLAMED, ids=" ".join)
def test_who_is_to_blame_is_told(does: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that failed by themselves; else those that say nothing; else those that lost another."""
    monkeypatch.setattr(side, "OTHERS_S", 0.3)
    commands = {gpu: [sys.executable, "-c", PART, what] for gpu, what in zip((3, 5), does, strict=True)}
    with ProcessSide.started("prefix", commands, os.environ) as prefix:
        prefix.wait()
        monkeypatch.setattr(side, "END_S", 0.1)
        with pytest.raises(EngineError) as caught:
            prefix.ask("x")
    assert re.match("(calibrate: )?" + BLAMED[does], str(caught.value))


# ---- processes

SMALL = Shape(
    layers=2, hidden=16, ffn=32, heads=4, kv_heads=2, head_dim=8, vocab=64, dtype="float32", train_tp=2, rollout_tp=1
)
GRID = Grid((2,), (8,), (12,), (SMS,), (4,), (4,), (4, 12), 2, 0.2)


@contextmanager
def started(job: Job, folder: Path) -> Iterator[tuple[ProcessSide, ProcessSide]]:
    """Both sides, decode and prefix; none of their processes is left."""
    with ExitStack() as stack:
        found: list[ProcessSide] = []
        for name in ("decode", "prefix"):
            told = (p.model_copy(update={"shape": SMALL}) for p in posts(job, name, (0, 1), folder))
            found.append(stack.enter_context(ProcessSide.started(name, {p.gpu: command(p) for p in told}, ENVIRONMENT)))
        for one in found:
            one.wait()
        yield found[0], found[1]
    assert not any(psutil.pid_exists(s.process.pid) for one in found for s in one.stations)


def untold(what: str, figure: str) -> None:
    """Nobody hears of it."""


@pytest.mark.processes
def test_two_processes_measure_a_point_together(tmp_path: Path) -> None:
    """Ranks of a trainer, each beside an engine: they count the same forwards between a mark and a reading."""
    with started(job_of(tmp_path), tmp_path) as (decode, prefix):
        assert [f["device"] for f in prefix.facts] == ["CPU 0", "CPU 1"]
        run = Measurement(decode, prefix, GRID, untold)
        run.sums()
        run.alone()
        run.at(2)
        assert [s.nbytes for s in run.found.sums] == [4 * 16 * 4, 12 * 16 * 4]
        assert all(0 < s.seconds < 1 for s in run.found.sums)
        (row,) = run.found.rows
        assert (row.batch, row.chunk_tokens, row.sms) == (2, 12, SMS)
        assert 0 < row.step_s < 1
        assert 0 < row.tokens_per_s < 1e6
        prefix.ask("prefix", tokens=11, sms=0)  # one token more makes two stretches of six
        prefix.ask("mark")
        time.sleep(0.3)
        first, second = prefix.ask("read")
        assert first["count"] == second["count"] > 1
        prefix.ask("end")
    assert all(s.process.returncode == 0 for s in (*decode.stations, *prefix.stations))


@pytest.mark.processes
def test_a_rank_that_dies_or_stands_still_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a point, though its peer fails too, in the collective; here engines have two ranks as well."""
    with started(job_of(tmp_path, MATCHED, WHOLE), tmp_path) as (decode, prefix):
        victim = prefix.stations[1].process
        run = Measurement(decode, prefix, GRID, untold)
        run.alone()
        run.at(2)

        def killed(seconds: float) -> None:
            os.kill(victim.pid, signal.SIGKILL)
            time.sleep(seconds)

        began = time.monotonic()
        with pytest.raises(EngineError) as caught:
            replace(run, sleep=killed)._point(2, 12, SMS)
        assert "the prefix side of GPU 1 has ended" in str(caught.value)
        assert "GPU 0" not in str(caught.value)
        assert time.monotonic() - began < side.OTHERS_S + GONE_S
        monkeypatch.setattr(side, "ANSWER_S", 2.0)
        os.kill(decode.stations[0].process.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"the decode side of GPU 0 has not answered mark for 2 s"):
            decode.ask("mark")
        monkeypatch.setattr(side, "END_S", 1.0)
