"""Groups of ranks on GPUs of their own: NCCL for tensors of the GPU, gloo for those of the host. Needs two GPUs.

pair      two processes, a GPU each, run one function that each has the same groups in
a figure  what a rank computes is set beside the closed form, not beside another rank's
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from two_gpus import two_gpu_job

from rollplex.backends.collectives import Groups

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs and cuda-python")
N, LATE_S = 1000, 15.0
ROOT = Path(__file__).parent.parent


def started(what: str, meeting: Path) -> list[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return [
        subprocess.Popen(
            [sys.executable, __file__, what, str(rank), str(meeting)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip


def pair(what: str, meeting: Path) -> list[dict[str, Any]]:
    """What both ranks have found."""
    found = []
    for process in started(what, meeting):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
    return found


# ---- what a rank does


def sums(rank: int, groups: Groups, meeting: Path) -> dict[str, Any]:
    """Every collective on tensors of the GPU and of the host; in another thread too, whose current device is 0."""
    found: dict[str, Any] = {}
    for where in (torch.device("cuda", rank), torch.device("cpu")):
        x = torch.arange(N, device=where, dtype=torch.float32) + rank
        groups.all_reduce("tp", x)
        own = torch.full((N,), 1.0 + rank, device=where)
        groups.reduce("tp", own, owner=1)
        told = torch.full((N,), float(rank), device=where)
        groups.broadcast("tp", told, owner=1)
        gathered = groups.all_gather("tp", torch.full((2, 3), float(rank), device=where))
        beside = torch.full((N,), 1.0 + rank, device=where)
        thread = threading.Thread(target=groups.all_reduce, args=("tp", beside))
        thread.start()
        thread.join()
        found[where.type] = {
            "all_reduce": torch.equal(x.cpu(), 2 * torch.arange(N, dtype=torch.float32) + 1),
            "reduce": float(own[0]) if rank == 1 else 3.0,
            "broadcast": float(told.min()),
            "all_gather": gathered.tolist(),
            "in a thread": float(beside.min()),
        }
    exact = torch.tensor([1.0 + 2.0**-40 * rank], dtype=torch.float64)
    groups.all_reduce("tp", exact)
    found["float64 on the host"] = float(exact) - 2.0
    return found


def parted(rank: int, groups: Groups, meeting: Path) -> dict[str, Any]:
    """Kernels of a partition, and collectives between them, in the order in which they were launched."""
    from rollplex.backends.cuda.partition import Partition

    half, device = Partition(rank, 64), torch.device("cuda", rank)
    x = torch.ones(4096, 4096, device=device)
    with half():
        for _ in range(20):
            x = (x @ x) / 4096  # stays 1, and takes long enough to be overtaken
            groups.all_reduce("tp", x)
            x = x / 2
    return {"least": float(x.min()), "most": float(x.max())}


def late(rank: int, groups: Groups, meeting: Path) -> dict[str, Any]:
    """Rank 1 never comes."""
    if rank == 0:
        groups.all_reduce("tp", torch.zeros(N, device="cuda:0"))
        torch.cuda.synchronize()
    time.sleep(60)
    return {}


# ---- the tests


def test_collectives_of_both_devices(tmp_path: Path) -> None:
    wanted = {
        "all_reduce": True,
        "reduce": 3.0,
        "broadcast": 1.0,
        "all_gather": [[0.0] * 3 + [1.0] * 3] * 2,
        "in a thread": 3.0,
    }
    for found in pair("sums", tmp_path):
        assert found == {"cuda": wanted, "cpu": wanted, "float64 on the host": 2.0**-40}


def test_collectives_beside_a_partition_keep_their_order(tmp_path: Path) -> None:
    assert pair("parted", tmp_path) == [{"least": 1.0, "most": 1.0}] * 2


def test_a_rank_that_never_comes_ends_the_wait(tmp_path: Path) -> None:
    first, second = started("late", tmp_path)
    began = time.monotonic()
    _, said = first.communicate(timeout=100)
    second.kill()
    second.wait()
    assert first.returncode in (-signal.SIGABRT, 1)
    assert "ALLREDUCE" in said
    assert time.monotonic() - began < 90


if __name__ == "__main__":
    name, number, place = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    joined = Groups.join(two_gpu_job(silent_s=LATE_S if name == "late" else 60.0), "train", number, 2, place)
    print(json.dumps(globals()[name](number, joined, place)), flush=True)
    joined.close()
