"""New weights between two training ranks, each on its GPU: NCCL's all-gather in place, and direct writes to the peer.

python -m benchmarks.h200.exchange PLAN.json [--json FILE]      PLAN: TP 2 trains, TP 1 rolls out (job_3b_x2.yaml)

    slabs          one call a tensor of the rollout shard
    whole          one call: a half each
    NCCL           all-gather into the rank's own VMM arena
    direct         copies into the peer's arena, whose pages are adopted with access for the writer's own GPU: slab by
                   slab with the trainer's own code
    gather, load   without shared pages: NCCL's all-gather into a buffer, a copy of that into the engine's own weights

Both ranks send and receive at once, as clients of one MPS daemon. GB/s are bytes that a GPU receives.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.page import measured_with, table
from rollplex.backends.collectives import Groups
from rollplex.backends.cuda.mps import Mps
from rollplex.backends.cuda.vmm import CudaArena, CudaMemory
from rollplex.backends.facts import load_facts
from rollplex.backends.shard import Shard, shard_of
from rollplex.ir.job import Job
from rollplex.ir.placement import cuda_device
from rollplex.ir.plan import Plan, parse_plan
from rollplex.runtime.process import die_with

RANKS, WARM, TIMES = 2, 3, 20
LIMIT_S = 200.0


def main() -> None:
    """Start both ranks and print what they have measured; as a rank, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--json", type=Path, help="write there what each rank has measured")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        die_with(os.getppid())
        print(json.dumps(Rank(asked.plan, asked.rank, asked.meeting).measured()), flush=True)
        return
    found = both(asked.plan)
    if asked.json:
        asked.json.write_text(json.dumps(found), encoding="utf-8")
    print("\n".join([measured_with("torch"), "", *page(found)]))


def both(plan: Path) -> list[dict[str, Any]]:
    """What each rank has measured."""
    with Mps.running() as mps, TemporaryDirectory(prefix="rollplex-") as meeting:
        env = {**os.environ, **mps.environment()}
        command = [sys.executable, "-m", "benchmarks.h200.exchange", str(plan), "--meeting", meeting, "--rank"]
        started = [
            subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, text=True) for rank in range(RANKS)
        ]
        try:
            ended(started)
        finally:
            for process in started:
                process.kill()
        return [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]


def ended(ranks: Sequence[subprocess.Popen[str]], limit_s: float = LIMIT_S) -> None:
    """Wait for both, or until one has failed, for which the other would wait in a collective; SystemExit then."""
    deadline = time.monotonic() + limit_s
    while None in (codes := [process.poll() for process in ranks]) and not any(codes):
        if time.monotonic() > deadline:
            raise SystemExit(f"a rank has not ended for {limit_s:g} s: {codes}")
        time.sleep(0.1)
    if any(codes):
        raise SystemExit(f"a rank has failed: {codes}")


def page(found: list[dict[str, Any]]) -> list[str]:
    """The slower rank of each way; both have looked at every byte that they received."""
    first = found[0]
    nbytes, calls = first["bytes"], first["calls"]
    rows = []
    for name in first["ms"]:
        ms = max(f["ms"][name] for f in found)
        rows.append((name, f"{ms:.2f}", f"{nbytes / ms / 1e6:.0f}"))
    told = f"{nbytes / 1e9:.2f} GB received a GPU in {calls} slabs of {nbytes / calls / 1e6:.1f} MB on average"
    right = all(f["right"] for f in found)
    return [*table(("way", "ms", "GB/s"), rows), "", f"{told}; values {'as sent' if right else 'WRONG'} on both ranks"]


class Rank:
    """One training rank: its groups, its arena with the shard of its GPU's rollout rank, and its peer's arena."""

    def __init__(self, path: Path, rank: int, meeting: Path) -> None:
        plan = parse_plan(json.loads(path.read_text(encoding="utf-8")))
        job = Job.model_validate(plan.job)
        assert (job.train_tp, job.q) == (RANKS, RANKS), "a plan of TP 2 to 1 on two GPUs"
        self.rank = rank
        self.groups = Groups.join(job, "train", rank, RANKS, meeting)
        memory = CudaMemory(cuda_device(job, rank))
        nbytes = plan.object(f"{job.policy}.snapshot").bytes
        self.own, self.peer, self.engine = (memory.reserve(name, nbytes) for name in ("own", "peer", "engine"))
        self.own.map()
        self.engine.map()
        self._swap(meeting)
        self.shard = _shard(plan, job)

    def measured(self) -> dict[str, Any]:
        """Milliseconds of each way, and whether every byte came."""
        ways: dict[str, Callable[[], None]] = {
            "NCCL, slabs": lambda: self._gather(self._slabs(self.own)),
            "NCCL, whole": lambda: self._gather([self._halves(self.own)]),
            "direct, slabs": lambda: self.shard.send(self.rank, self._flat(self.own), self._flat(self.peer)),
            "direct, whole": self._write,
            "gather, load, slabs": self._load,
        }
        right, times = True, {}
        for name, way in ways.items():
            parts = list(self._slabs(self.own)) if name.endswith("slabs") else [self._halves(self.own)]
            for part in parts:
                part[self.rank], part[1 - self.rank] = 1.0 + self.rank, 0.0
            self._together()
            way()
            self._together()
            came = self._slabs(self.engine) if name.startswith("gather") else parts
            right &= all(bool((part[1 - self.rank] == 2.0 - self.rank).all()) for part in came)
            times[name] = self._ms(way)
        calls = [slabs[0].numel() * slabs.itemsize for slabs in self._slabs(self.own)]
        self._close()
        return {"ms": times, "right": right, "bytes": sum(calls), "calls": len(calls)}

    def _gather(self, parts: Any) -> None:
        for slabs in parts:
            self._fill(slabs)

    def _fill(self, slabs: Tensor) -> None:
        """[ranks, elements]: each rank's row to the other, in place."""
        dist.all_gather_into_tensor(slabs.view(-1), slabs[self.rank], group=self.groups.handle("tp"))

    def _write(self) -> None:
        self._halves(self.peer)[self.rank].copy_(self._halves(self.own)[self.rank])

    def _load(self) -> None:
        for slabs, into in zip(self._slabs(self.own), self._slabs(self.engine), strict=True):
            whole = torch.empty_like(slabs)
            whole[self.rank].copy_(slabs[self.rank])
            self._fill(whole)
            into.copy_(whole)

    def _flat(self, arena: CudaArena) -> Tensor:
        return arena.view(0, (arena.nbytes // 2,), torch.bfloat16)

    def _slabs(self, arena: CudaArena) -> Iterator[Tensor]:
        return (slabs for region in self.shard.regions for slabs in region.gathered(self._flat(arena)))

    def _halves(self, arena: CudaArena) -> Tensor:
        """As many bytes as all slabs."""
        numel = sum(slabs.numel() for slabs in self._slabs(arena))
        return arena.view(0, (RANKS, numel // RANKS), torch.bfloat16)

    def _ms(self, way: Callable[[], None]) -> float:
        for _ in range(WARM):
            way()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._together()
        began.record()
        for _ in range(TIMES):
            way()
        ended.record()
        self._together()
        return began.elapsed_time(ended) / TIMES

    def _together(self) -> None:
        """Both have done what they were asked for."""
        torch.cuda.synchronize()
        self.groups.meet("tp")

    def _swap(self, meeting: Path) -> None:
        """Each adopts the other's pages, to write into them."""
        place = str(meeting / "pages")
        with socket.socket(socket.AF_UNIX) as opened:
            if self.rank == 0:
                opened.bind(place)
                opened.listen(1)
                self._together()
                peer = opened.accept()[0]
            else:
                self._together()
                opened.connect(place)
                peer = opened.dup()
            with peer:
                fds = self.own.export()
                socket.send_fds(peer, [b"pages"], fds)
                self.peer.adopt(socket.recv_fds(peer, 16, len(fds))[1], writable=True)
            for fd in fds:
                os.close(fd)

    def _close(self) -> None:
        """Who adopted pages lets them go before their owner does."""
        self.peer.close()
        self._together()
        self.own.close()
        self.engine.close()
        self.groups.close()


def _shard(plan: Plan, job: Job) -> Shard:
    trainer, roller = (load_facts(plan.processes[kind].engine) for kind in ("train", "rollout"))
    return shard_of(job.spec, plan.summary.layout, trainer, roller, job.rollout_tp, 0)


if __name__ == "__main__":
    main()
