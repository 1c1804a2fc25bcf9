"""MiB of a GPU that a process takes beside what it allocates: CUDA context, kernels, NCCL communicators.

rank 0/2  2 communicators               used 2073 MiB, 54 of them allocated by torch

python benchmarks/context_memory.py 0 1            one process;  run `.. 1 2 &` beside `.. 0 2` for two GPUs
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])
QUERY = ("nvidia-smi", "-i", str(RANK), "--query-gpu=memory.used", "--format=csv,noheader,nounits")


def say(what: str) -> None:
    """One line: what was done last, and what the driver says is used."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.barrier()
    used = int(subprocess.run(QUERY, capture_output=True, text=True, check=True).stdout)
    own = torch.cuda.memory_reserved() >> 20
    print(f"rank {RANK}/{WORLD}  {what:<28} used {used} MiB, {own} of them allocated by torch", flush=True)


def kernels() -> None:
    """The kernels every engine loads: a GEMM (cuBLAS and its workspace) and flash attention."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 8, 512, 128, device="cuda", dtype=torch.bfloat16)
    a @ a
    F.scaled_dot_product_attention(q, q, q, is_causal=True)


def collectives(group: dist.ProcessGroup | None) -> None:
    """One all-reduce, one all-gather, one reduce-scatter: NCCL connects when a group is first used."""
    t = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(t, group=group)
    dist.all_gather_into_tensor(torch.empty(WORLD << 20, device="cuda"), t, group=group)
    dist.reduce_scatter_tensor(torch.empty((1 << 20) // WORLD, device="cuda"), t, group=group)


def main() -> None:
    """Take one thing after the other and say what is used."""
    torch.cuda.set_device(RANK)
    torch.zeros(1, device="cuda")
    say("context")
    kernels()
    say("GEMM and attention")
    if WORLD == 1:
        return
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512", RANK=str(RANK), WORLD_SIZE=str(WORLD))
    dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    collectives(None)
    say("1 communicator")
    for number in range(2, 5):
        collectives(dist.new_group(list(range(WORLD))))
        say(f"{number} communicators")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
