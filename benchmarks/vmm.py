"""What arenas cost on a GPU: map, unmap, export and adopt by the bytes of a handle, and what a second reader takes.

    python benchmarks/vmm.py [GIB] [--gpu N]

Medians of 9 rounds in one run; needs an NVIDIA GPU and cuda-python. A mapping is zeroed, at the GPU's own bandwidth.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from rollplex.backends.cuda.vmm import CudaArena, CudaMemory

ROUNDS = 9
CHUNKS_MIB = (2, 16, 64, 256, 1024)


def timed(work: Callable[[], object]) -> float:
    """Milliseconds, all work of the GPU included."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def one_round(owner: CudaArena, reader: CudaArena) -> tuple[float, ...]:
    """Milliseconds of map, export, adopt, unmap of the reader and of the owner, whose pages go then."""
    fds: list[int] = []
    mapped = timed(owner.map)
    exported = timed(lambda: fds.extend(owner.export()))
    return (mapped, exported, timed(lambda: reader.adopt(fds)), timed(reader.unmap), timed(owner.unmap))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gib", nargs="?", type=float, default=8.0)
    parser.add_argument("--gpu", type=int, default=0)
    asked = parser.parse_args()
    nbytes = int(asked.gib * 2**30)
    print(
        f"{torch.cuda.get_device_name(asked.gpu)}, torch {torch.__version__}, {asked.gib:g} GiB, median of {ROUNDS}\n"
    )
    print("| handles of MiB | map ms | export ms | adopt ms | unmap, reader ms | unmap, owner ms |")
    print("|---|---|---|---|---|---|")
    for mib in CHUNKS_MIB:
        memory = CudaMemory(asked.gpu, chunk_bytes=mib << 20)
        owner, reader = memory.reserve("w", nbytes), memory.reserve("w", nbytes)
        one_round(owner, reader)
        rounds = [one_round(owner, reader) for _ in range(ROUNDS)]
        print(f"| {mib} | " + " | ".join(f"{median(column):.2f}" for column in zip(*rounds, strict=True)) + " |")
    memory = CudaMemory(asked.gpu)
    owner, reader = memory.reserve("w", nbytes), memory.reserve("w", nbytes)
    free = [torch.cuda.mem_get_info(asked.gpu)[0]]
    owner.map()
    free.append(torch.cuda.mem_get_info(asked.gpu)[0])
    reader.adopt(owner.export())
    free.append(torch.cuda.mem_get_info(asked.gpu)[0])
    print(f"\nbytes of the first copy {free[0] - free[1]:,}, of a second reader {free[1] - free[2]:,}")


if __name__ == "__main__":
    main()
