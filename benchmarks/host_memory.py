"""MiB of host memory of a process beside pinned memory and data: Python, torch, transformers, CUDA, NCCL.

rank 0/2  1 communicators          resident 1490, of it shared with others 411: 1284 of its own

python benchmarks/host_memory.py 0 1            one process;  run `.. 1 2 &` beside `.. 0 2` for two GPUs
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])


def say(what: str) -> None:
    """One line: what was done last, and the kernel's sums; `of its own` counts a page n processes share as 1/n."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    mib = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines}
    shared = mib["Shared_Clean"] + mib["Shared_Dirty"]
    told = f"resident {mib['Rss']}, of it shared with others {shared}: {mib['Pss']} of its own"
    print(f"rank {RANK}/{WORLD}  {what:<24} {told}", flush=True)


def kernels() -> None:
    """The kernels every engine loads: a GEMM, and attention with its backward."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (a @ a).sum().item()
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def communicators(count: int) -> None:
    """NCCL connects when a group is first used."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("nccl", rank=RANK, world_size=WORLD)
    t = torch.zeros(1 << 20, device="cuda")
    for k in range(1, count + 1):
        dist.all_reduce(t, group=dist.new_group(list(range(WORLD))))
        torch.cuda.synchronize()
        say(f"{k} communicators")


def main() -> None:
    """Take one thing after the other and say what is resident."""
    say("torch")
    from transformers import Qwen2ForCausalLM  # as trainers do

    say(f"transformers, {Qwen2ForCausalLM.__name__[:5]}")
    torch.cuda.set_device(RANK)
    torch.zeros(1, device="cuda")
    say("context")
    kernels()
    say("a GEMM and an attention")
    if WORLD > 1:
        communicators(3)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
