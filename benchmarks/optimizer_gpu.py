"""The optimizer's stream on a GPU: pinned FP32 state through a ring of workspaces, against the link it goes over.

    python benchmarks/optimizer_gpu.py [MILLIONS OF PARAMETERS] [--chunk MILLIONS] [--gpu N]

One run measures the link each way, both ways at once, and the stream with 1, 2 and 3 chunks in flight; an update moves
16 bytes a parameter to the GPU (master, two moments, gradient) and 12 back. Medians of 5.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from rollplex.backends.cuda.lanes import StreamLanes
from rollplex.backends.cuda.pinned import register
from rollplex.backends.cuda.vmm import CudaMemory
from rollplex.backends.memory.memfd import HostMemory
from rollplex.runtime.optimizer import AdamConfig, ChunkedAdam, FlatState, Workspace, allocate_workspace, flat_layout
from rollplex.runtime.stream import ChunkStream

ROUNDS = 5
TO_GPU, BACK = 16, 12


def timed(work: Callable[[], object]) -> float:
    """Seconds, all work of the GPU included; median of rounds after one that does not count."""
    seconds = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def link(up: torch.Tensor, down: torch.Tensor) -> tuple[float, float, float]:
    """GB/s to the GPU, back, and each way while both are at work."""
    there = torch.empty_like(up, device="cuda")
    here = torch.empty_like(down, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()

    def to_gpu() -> None:
        with torch.cuda.stream(first):
            there.copy_(up, non_blocking=True)

    def back() -> None:
        with torch.cuda.stream(second):
            down.copy_(here, non_blocking=True)

    gigabytes = up.numel() * up.element_size() / 1e9
    return gigabytes / timed(to_gpu), gigabytes / timed(back), gigabytes / timed(lambda: (to_gpu(), back()))


def update(adam: ChunkedAdam, chunks: list[tuple[int, int]], rooms: list[Workspace], step: int) -> None:
    """One step of the optimizer."""
    stream = ChunkStream(adam, chunks, rooms, StreamLanes(torch.cuda.current_device(), 60), step, 1.0, "actor")
    for index in range(len(chunks)):
        stream.update(index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("millions", nargs="?", type=int, default=1500)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--gpu", type=int, default=0)
    asked = parser.parse_args()
    torch.cuda.set_device(asked.gpu)
    numel, size = asked.millions * 10**6, asked.chunk * 10**6
    pool = HostMemory().reserve("pinned", 4 * 4 * numel)
    pool.map()
    began = time.perf_counter()
    register(pool, asked.gpu)
    gib = pool.nbytes / 2**30
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{asked.millions} M parameters, chunks of {asked.chunk} M")
    print(f"pinned {gib:.1f} GiB in {time.perf_counter() - began:.1f} s")
    state = FlatState(*(pool.view(4 * numel * i, (numel,), torch.float32) for i in range(4)))
    up, down, both = link(state.master[: 256 << 20], state.grad[: 256 << 20])
    print(f"link {up:.1f} GB/s to the GPU, {down:.1f} back, {both:.1f} each way at once\n")
    for part in (state.master, state.exp_avg, state.exp_avg_sq, state.grad):
        part.zero_()
    arena = CudaMemory(asked.gpu).reserve("actor.snapshot", 2 * numel)
    arena.map()
    snapshot = {"actor": arena.view(0, (numel,), torch.bfloat16)}
    adam = ChunkedAdam(AdamConfig(1e-6, weight_decay=0.01), flat_layout([("actor", numel)]), state, snapshot)
    chunks = [(at, min(at + size, numel)) for at in range(0, numel, size)]
    bound = max(TO_GPU, BACK) * numel / 1e9 / both
    print("| in flight | workspaces GiB | update s | GB/s to the GPU | GB/s back | share of the duplex link |")
    print("|---|---|---|---|---|---|")
    for in_flight in (1, 2, 3):
        rooms = [allocate_workspace(size, torch.float32, "cuda") for _ in range(in_flight)]
        seconds = timed(lambda rooms=rooms: update(adam, chunks, rooms, 1))
        rates = [bytes_ * numel / 1e9 / seconds for bytes_ in (TO_GPU, BACK)]
        print(
            f"| {in_flight} | {in_flight * 16 * size / 2**30:.1f} | {seconds:.3f} | {rates[0]:.1f} | {rates[1]:.1f} | "
            f"{100 * bound / seconds:.0f} % |"
        )


if __name__ == "__main__":
    main()
