"""A rank's slabs in its peer's pages, on two GPUs and with both ranks on one: the product's writes, no collective.

process 0   device 0    its pages |s0 s1|    the other's, imported |s0 s1|      writes s0 into them
process 1   device 1    its pages |s0 s1|    the other's, imported |s0 s1|      writes s1
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from two_gpus import two_gpu_job

from rollplex.backends.collectives import Groups
from rollplex.backends.memory.ledger import Ledger
from rollplex.backends.publication import Stamp, StampPage
from rollplex.backends.shard import Region, Shard
from rollplex.backends.training.peers import Peer
from rollplex.ir.errors import PlanError
from rollplex.ir.placement import cuda_device

MIB, ROOT = 1 << 20, Path(__file__).parent.parent
SHAPE = (4096, 8192)
"""Of a region of 64 MiB in bfloat16; the snapshot has two, one of them whole on both ranks."""
SHARD = Shard((Region("cut", 0, SHAPE, slabs=2, axis=0), Region("whole", SHAPE[0] * SHAPE[1], SHAPE)))
NBYTES = 2 * SHARD.numel
FOUND = torch.cuda.device_count()
DEVICES = [
    pytest.param((0, 1), marks=pytest.mark.skipif(FOUND < 2, reason="needs two NVIDIA GPUs"), id="two GPUs"),
    pytest.param((0, 0), marks=pytest.mark.skipif(FOUND < 1, reason="needs an NVIDIA GPU"), id="one GPU"),
]


@pytest.mark.parametrize("devices", DEVICES)
def test_slabs_are_written_into_the_peers_pages(devices: tuple[int, int], tmp_path: Path) -> None:
    """[rank 0's slab, rank 1's slab, what both have] on each rank; the pages cost nobody but their owner anything."""
    own = [[1.0, 2.0, 10.0], [1.0, 2.0, 20.0]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *map(str, devices), str(rank), str(tmp_path)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank, process in enumerate(ranks):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err[-3000:]
        found = json.loads(out.splitlines()[-1])
        assert found["means"] == own[rank]
        assert found["allocated"] == 0
        assert found["refused"] == f"actor.snapshot is still mapped by train {1 - rank}"
        assert abs(found["left"]) < 32 * MIB < NBYTES


def swapped(rank: int, meeting: Path, groups: Groups, fds: list[int]) -> list[int]:
    """Descriptors of the other process for as many of one's own, which are closed."""
    place = str(meeting / "peers")
    with socket.socket(socket.AF_UNIX) as opened:
        if rank == 0:
            opened.bind(place)
            opened.listen(1)
            groups.meet("tp")
            other = opened.accept()[0]
        else:
            groups.meet("tp")
            opened.connect(place)
            other = opened.dup()
        with other:
            socket.send_fds(other, [b"fds"], fds)
            found = socket.recv_fds(other, 16, len(fds))[1]
    for fd in fds:
        os.close(fd)
    return found


def refusal(ledger: Ledger) -> str:
    """What the owner's ledger says to a release while the peer has the pages."""
    try:
        ledger.check_release("actor.snapshot", "unmap")
    except PlanError as error:
        return error.problems[0].what.removeprefix("unmap: ")
    return ""


def exchanged(device: int, rank: int, meeting: Path, groups: Groups) -> dict[str, Any]:
    """What a rank's own pages hold when both have written, and what is left of it all."""
    from rollplex.backends.cuda.vmm import CudaMemory

    memory = CudaMemory(device, chunk_bytes=48 * MIB)  # chunks end inside of slabs
    torch.zeros(16, dtype=torch.bfloat16, device=torch.device("cuda", device)).float().mean()  # loads its kernels
    torch.cuda.synchronize(device)
    groups.meet("tp")
    before = torch.cuda.mem_get_info(device)[0]
    groups.meet("tp")
    own, there = (memory.reserve(name, NBYTES) for name in ("actor.snapshot", "the peer's"))
    ledger, stamp = Ledger.create(f"device {device}", 4 * NBYTES, process=f"train {rank}"), StampPage.create()
    ledger.acquire("actor.snapshot", NBYTES, "start")
    own.map()
    stamp.write(Stamp(0, 1))
    flat = own.view(0, (SHARD.numel,), torch.bfloat16)
    cut, whole = flat.view(2, -1)
    cut.view(2, -1)[rank] = 1.0 + rank
    whole[:] = 10.0 * (1 + rank)
    torch.cuda.synchronize(device)
    *fds, theirs = swapped(rank, meeting, groups, [*own.export(), stamp.export(), ledger.export()])
    peer = Peer("actor.snapshot", f"train {1 - rank}", there, Ledger.attach(theirs, process=f"train {rank}"))
    peer.adopt(fds, "start")
    allocated = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    groups.meet("tp")
    SHARD.send(rank, flat, peer.pages(torch.bfloat16))
    torch.cuda.synchronize(device)
    groups.meet("tp")
    more = torch.cuda.max_memory_allocated(device) - allocated
    means = [float(part.float().mean()) for part in (*cut.view(2, -1), whole)]
    refused = refusal(ledger)
    groups.meet("tp")
    peer.let_go("unmap")
    groups.meet("tp")
    ledger.release("actor.snapshot", "unmap")
    own.close()
    torch.cuda.empty_cache()
    groups.meet("tp")
    left = before - torch.cuda.mem_get_info(device)[0]
    groups.meet("tp")
    return {"means": means, "allocated": more, "refused": refused, "left": left}


if __name__ == "__main__":
    *devices, number = map(int, sys.argv[1:4])
    job, place = two_gpu_job(silent_s=60.0, devices=devices), Path(sys.argv[4])
    joined = Groups.join(job, "train", number, 2, place)
    print(json.dumps(exchanged(cuda_device(job, number), number, place, joined)), flush=True)
    joined.close()
