"""The optimizer's stream on a GPU: pinned FP32 state through a ring of workspaces, against the link it goes over.

    python -m benchmarks.optimizer_gpu [MILLIONS OF PARAMETERS] [--chunk MILLIONS] [--gpu N]

One run measures the link each way, both ways at once, and the stream with 1, 2 and 3 chunks in flight; an update moves
16 bytes a parameter to the GPU (master, two moments, gradient) and 12 back. Medians of 5.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.page import table
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


@dataclass(frozen=True)
class Stream:
    """One run: GB/s of the link to the GPU, back, and each way at once; seconds of an update by chunks in flight."""

    millions: int
    link: tuple[float, float, float]
    seconds: dict[int, float]

    @property
    def bound_s(self) -> float:
        """What the busier direction takes while both are at work."""
        return max(TO_GPU, BACK) * self.millions * 1e6 / 1e9 / self.link[2]

    def share(self, in_flight: int) -> float:
        """Of the duplex link's rate, 0 to 1."""
        return self.bound_s / self.seconds[in_flight]

    def rates(self, in_flight: int) -> tuple[float, float]:
        """GB/s to the GPU, and back."""
        to_gpu, back = (n * self.millions * 1e6 / 1e9 / self.seconds[in_flight] for n in (TO_GPU, BACK))
        return to_gpu, back


def measure(millions: int, chunk: int, gpu: int, say: Callable[[str], object] = print) -> Stream:
    """So many million parameters, in chunks of so many millions."""
    numel, size = millions * 10**6, chunk * 10**6
    pool = HostMemory().reserve("pinned", 4 * 4 * numel)
    pool.map()
    began = time.perf_counter()
    register(pool, gpu)
    say(f"pinned {pool.nbytes / 2**30:.1f} GiB in {time.perf_counter() - began:.1f} s")
    state = FlatState(*(pool.view(4 * numel * i, (numel,), torch.float32) for i in range(4)))
    rates = link(state.master[: 256 << 20], state.grad[: 256 << 20])
    for part in (state.master, state.exp_avg, state.exp_avg_sq, state.grad):
        part.zero_()
    arena = CudaMemory(gpu).reserve("actor.snapshot", 2 * numel)
    arena.map()
    snapshot = {"actor": arena.view(0, (numel,), torch.bfloat16)}
    adam = ChunkedAdam(AdamConfig(1e-6, weight_decay=0.01), flat_layout([("actor", numel)]), state, snapshot)
    chunks = [(at, min(at + size, numel)) for at in range(0, numel, size)]
    seconds = {}
    for in_flight in (1, 2, 3):
        rooms = [allocate_workspace(size, torch.float32, "cuda") for _ in range(in_flight)]
        seconds[in_flight] = timed(lambda rooms=rooms: update(adam, chunks, rooms, 1))
    return Stream(millions, rates, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("millions", nargs="?", type=int, default=1500)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    asked = parser.parse_args()
    torch.cuda.set_device(asked.gpu)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{asked.millions} M parameters, chunks of {asked.chunk} M")
    found = measure(asked.millions, asked.chunk, asked.gpu)
    up, down, both = found.link
    print(f"link {up:.1f} GB/s to the GPU, {down:.1f} back, {both:.1f} each way at once\n")
    rows = []
    for n, seconds in found.seconds.items():
        room, rates = n * 16 * asked.chunk * 10**6 / 2**30, found.rates(n)
        figures = (f"{room:.1f}", f"{seconds:.3f}", f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{found.share(n):.0%}")
        rows.append((str(n), *figures))
    head = ("in flight", "workspaces GiB", "update s", "GB/s to the GPU", "GB/s back", "share of the duplex link")
    print("\n".join(table(head, rows)))
    if asked.json:
        asked.json.write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
