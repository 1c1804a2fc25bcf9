"""The optimizer stream and publication on a CPU, against torch.optim and against a copy that is loaded.

update        one step of AdamW in float32 over state in a pinned pool, new weights in BF16 in shared pages
publication   from the last byte written until another process reads the new weights

python benchmarks/host_optimizer.py [millions of parameters] > benchmarks/results/host_optimizer.md
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from statistics import median

import torch
from torch import Tensor

from rollplex.backends.lanes import ThreadLanes
from rollplex.backends.memory.memfd import HostArena, HostMemory
from rollplex.backends.publication import Publication, Subscription
from rollplex.runtime.optimizer import AdamConfig, ChunkedAdam, FlatState, Slab, even_chunks, flat_layout
from rollplex.runtime.stream import UPDATE, ChunkStream, ring

TENSORS, CHUNKS, REPEATS = 48, 96, 7
CONFIG = AdamConfig(lr=1e-4, weight_decay=0.1)
STREAMED_BYTES = 16 + 12 + 2
"""Of a parameter: gradient, master weight and moments come, master weight and moments go, and a BF16 weight."""
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """The same numbers for every way to update them: state in pages of its own, weights in shared ones."""

    slabs: tuple[Slab, ...]
    state: FlatState
    weights: Weights

    @classmethod
    def make(cls, memory: HostMemory, numel: int) -> Subject:
        slabs = flat_layout((f"w{i}", numel // TENSORS) for i in range(TENSORS))
        master, first, second, grad = (_flat(memory, name, slabs[-1].stop) for name in ("master", "m", "v", "grad"))
        rng = torch.Generator().manual_seed(0)
        master.normal_(generator=rng)
        grad.normal_(generator=rng)
        shared = _flat(memory, "snapshot", slabs[-1].stop, torch.bfloat16)
        return cls(slabs, FlatState(master, first, second, grad), {s.name: shared[s.offset : s.stop] for s in slabs})

    @property
    def numel(self) -> int:
        return self.slabs[-1].stop


def _arena(memory: HostMemory, name: str, nbytes: int) -> HostArena:
    arena = memory.reserve(name, nbytes)
    arena.map()
    return arena


def _flat(memory: HostMemory, name: str, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return _arena(memory, name, numel * dtype.itemsize).view(0, (numel,), dtype)


# ---- the update


def streamed(subject: Subject, in_flight: int) -> Callable[[int], None]:
    """Our stream, with so many chunks in flight."""
    adam = ChunkedAdam(CONFIG, subject.slabs, subject.state, subject.weights)
    chunks = even_chunks(subject.numel, CHUNKS)
    rooms = ring(chunks, in_flight, torch.float32)

    def step(number: int) -> None:
        stream = ChunkStream(adam, chunks, rooms, ThreadLanes(UPDATE, 60), number, 0.5, "weights")
        for index in range(len(chunks)):
            stream.update(index)

    return step


def unchunked(subject: Subject) -> Callable[[int], None]:
    """torch.optim.AdamW on whole parameters, each gradient scaled as our load does; then the weights cast."""
    state = subject.state
    params = {s.name: torch.nn.Parameter(state.master[s.offset : s.stop]) for s in subject.slabs}
    adam = torch.optim.AdamW(
        params.values(), lr=CONFIG.lr, betas=CONFIG.betas, eps=CONFIG.eps, weight_decay=CONFIG.weight_decay
    )

    def step(number: int) -> None:
        for slab in subject.slabs:
            params[slab.name].grad = state.grad[slab.offset : slab.stop] * 0.5
        adam.step()
        with torch.no_grad():
            for name, param in params.items():
                subject.weights[name].copy_(param)

    return step


def timed_updates(numel: int) -> dict[str, float]:
    """Median seconds of one update, the ways taking turns; they must agree to the bit."""
    memory = HostMemory()
    subjects = [Subject.make(memory, numel) for _ in range(3)]
    ways = {
        "overlapped, 3 in flight": streamed(subjects[0], 3),
        "one after the other": streamed(subjects[1], 1),
        "torch.optim.AdamW, unchunked": unchunked(subjects[2]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1, REPEATS + 2):
        for name, step in ways.items():
            began = time.perf_counter()
            step(number)
            seconds[name].append(time.perf_counter() - began)
    first = subjects[0]
    for other in subjects[1:]:
        assert torch.equal(first.state.master, other.state.master), "the ways do not agree"
        assert all(torch.equal(first.weights[n], other.weights[n]) for n in first.weights)
    return {name: median(each[1:]) for name, each in seconds.items()}  # the first touches pages


# ---- publication


def _read(weights: Sequence[Tensor]) -> float:
    """What a reader does to see that weights are there: one element of each tensor."""
    return sum(float(w[0]) for w in weights)


def serve(there: Connection, pages: Tensor, staged: Tensor, reader: Subscription) -> None:
    """The rollout side: reads shared pages in place, or copies what is staged into weights of its own."""
    own = torch.empty_like(pages)
    size, version = pages.numel() // TENSORS, 0
    while (order := there.recv()) != "stop":
        if order == "in place":
            version += 1
            with reader.readable(version):
                there.send(_read(pages.split(size)))
        else:
            own.copy_(staged)
            there.send(_read(own.split(size)))


def timed_publications(numel: int) -> dict[str, float]:
    """Median seconds from the order to publish to the reader's answer, another process."""
    memory = HostMemory()
    pages, staged = (_flat(memory, name, numel, torch.bfloat16) for name in ("snapshot", "staged"))
    publication = Publication(None)
    here, there = Pipe()
    if os.fork() == 0:
        serve(there, pages, staged, Subscription(publication.page.export(), "trainer", lambda: ""))
        os._exit(0)

    def in_place() -> None:
        publication.publish()
        here.send("in place")

    def copied() -> None:
        staged.copy_(pages)
        here.send("copy")

    seconds: dict[str, list[float]] = {"in place": [], "copy and load": []}
    for number in range(REPEATS + 1):
        for name, publish in (("in place", in_place), ("copy and load", copied)):
            pages.fill_(number)  # what an update has written
            began = time.perf_counter()
            publish()
            assert here.recv() == number * TENSORS, "the reader saw other weights"
            seconds[name].append(time.perf_counter() - began)
    here.send("stop")
    os.wait()
    return {name: median(each[1:]) for name, each in seconds.items()}


# ---- the page


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, and print a page whose last line is the summary."""
    numel = int(float(sys.argv[1]) * 1e6) if len(sys.argv) > 1 else 32_000_000
    numel -= numel % (TENSORS * 64)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    publications = timed_publications(numel)  # first: the other process is a fork
    updates = timed_updates(numel)
    print("# The optimizer stream and publication on a CPU\n")
    print(f"`python benchmarks/host_optimizer.py {numel / 1e6:.2f}`; Python {platform.python_version()}, torch")
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, load {load:.1f}"
    print(f"{torch.__version__}; {machine}; one torch")
    print(f"thread a lane; {numel:,} parameters in {TENSORS} tensors, {CHUNKS} chunks; medians of {REPEATS}, the ways")
    print("taking turns. All give the same bits.\n")
    print("One update of AdamW with clipping, FP32 state, BF16 weights written; GB/s counts 30 bytes a parameter,")
    print("what a stream moves.\n")
    print(_row("update", "ms", "GB/s"), _row("---", "---:", "---:"), sep="\n")
    for name, seconds in updates.items():
        print(_row(name, f"{seconds * 1e3:.1f}", f"{numel * STREAMED_BYTES / seconds / 1e9:.2f}"))
    print(f"\nNew weights ({numel * 2 / 2**20:.0f} MiB) visible to another process:\n")
    print(_row("publication", "ms"), _row("---", "---:"), sep="\n")
    for name, seconds in publications.items():
        print(_row(name, f"{seconds * 1e3:.3f}"))
    three, one, torchs = updates.values()
    place, copy = publications.values()
    ratios = f"overlapped takes {three / one:.2f} of one after the other, {three / torchs:.2f} of unchunked torch.optim"
    print(f"\n{ratios}; publication in place takes 1/{copy / place:.0f} of a copy and load")


if __name__ == "__main__":
    main()
