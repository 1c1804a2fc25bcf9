"""The optimizer stream on a CPU: chunks that overlap, chunks one after the other, torch.optim on the whole state.

One step of AdamW in float32 over state in pages of its own, new weights in BF16 in shared pages. The bits are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from rollplex.backends.lanes import ThreadLanes
from rollplex.backends.memory.memfd import HostMemory
from rollplex.runtime.optimizer import AdamConfig, ChunkedAdam, FlatState, Slab, flat_layout
from rollplex.runtime.stream import UPDATE, ChunkStream, ring

TENSORS, CHUNKS = 48, 96
CONFIG = AdamConfig(lr=1e-4, weight_decay=0.1)
SCALE = 0.5
"""Of the gradient: as if its norm were clipped."""
STREAMED_BYTES = 16 + 12 + 2
"""Of a parameter: gradient, master weight and moments come, master weight and moments go, and a BF16 weight."""


@dataclass(frozen=True)
class Subject:
    """The same numbers for every way to update them: state in pages of its own, weights in shared ones."""

    slabs: tuple[Slab, ...]
    state: FlatState
    weights: dict[str, Tensor]

    @classmethod
    def make(cls, memory: HostMemory, numel: int) -> Subject:
        slabs = flat_layout((f"w{i}", numel // TENSORS) for i in range(TENSORS))
        master, first, second, grad = (flat(memory, name, numel) for name in ("master", "m", "v", "grad"))
        rng = torch.Generator().manual_seed(0)
        master.normal_(generator=rng)
        grad.normal_(generator=rng)
        shared = flat(memory, "snapshot", numel, torch.bfloat16)
        return cls(slabs, FlatState(master, first, second, grad), {s.name: shared[s.offset : s.stop] for s in slabs})


def whole_tensors(numel: int) -> int:
    """At most `numel` elements that TENSORS tensors and CHUNKS chunks divide evenly."""
    return numel - numel % (TENSORS * CHUNKS)


def flat(memory: HostMemory, name: str, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor in an arena of its own, which other processes may map."""
    arena = memory.reserve(name, numel * dtype.itemsize)
    arena.map()
    return arena.view(0, (numel,), dtype)


def streamed(subject: Subject, in_flight: int) -> Callable[[int], None]:
    """Our stream, with so many chunks in flight."""
    adam = ChunkedAdam(CONFIG, subject.slabs, subject.state, subject.weights)
    numel = subject.state.master.numel()
    chunks = tuple(pairwise(range(0, numel + 1, numel // CHUNKS)))
    rooms = ring(chunks, in_flight, torch.float32)

    def step(number: int) -> None:
        stream = ChunkStream(adam, chunks, rooms, ThreadLanes(UPDATE, 60), number, SCALE, "weights")
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
            params[slab.name].grad = state.grad[slab.offset : slab.stop] * SCALE
        adam.step()
        with torch.no_grad():
            for name, param in params.items():
                subject.weights[name].copy_(param)

    return step


@dataclass(frozen=True)
class Updates:
    """Median seconds of one update, each way."""

    overlapped: float
    one_by_one: float
    unchunked: float


def timed_updates(numel: int, repeats: int) -> Updates:
    """The ways take turns; they must agree to the bit."""
    memory = HostMemory()
    subjects = [Subject.make(memory, numel) for _ in range(3)]
    ways = (streamed(subjects[0], 3), streamed(subjects[1], 1), unchunked(subjects[2]))
    seconds: list[list[float]] = [[] for _ in ways]
    for number in range(1, repeats + 2):
        for step, taken in zip(ways, seconds, strict=True):
            began = time.perf_counter()
            step(number)
            taken.append(time.perf_counter() - began)
    first = subjects[0]
    for other in subjects[1:]:
        assert torch.equal(first.state.master, other.state.master), "the ways do not agree"
        assert all(torch.equal(first.weights[n], other.weights[n]) for n in first.weights)
    return Updates(*(median(taken[1:]) for taken in seconds))  # the first touches pages
