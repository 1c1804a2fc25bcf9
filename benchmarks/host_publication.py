"""Publication on a CPU: until another process reads new weights, in pages that both have or in a copy of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from statistics import median

import torch
from torch import Tensor

from benchmarks.host_update import TENSORS, flat
from rollplex.backends.memory.memfd import HostMemory
from rollplex.backends.publication import Publication, Subscription


@dataclass(frozen=True)
class Publications:
    """Median seconds from the order to publish to the reader's answer."""

    in_place: float
    copy_and_load: float


def timed_publications(numel: int, repeats: int) -> Publications:
    """Weights in BF16; the reader is a fork, so this comes before other threads are there."""
    memory = HostMemory()
    pages, staged = (flat(memory, name, numel, torch.bfloat16) for name in ("snapshot", "staged"))
    publication = Publication(None)
    here, there = Pipe()
    if (reader := os.fork()) == 0:
        _serve(there, pages, staged, Subscription(publication.page.export(), "trainer", lambda: ""))
        os._exit(0)

    def in_place() -> None:
        publication.publish()
        here.send("in place")

    def copied() -> None:
        staged.copy_(pages)
        here.send("copy")

    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats + 1):
        for publish, taken in zip((in_place, copied), seconds, strict=True):
            pages.fill_(number)  # what an update has written
            began = time.perf_counter()
            publish()
            assert here.recv() == number * TENSORS, "the reader saw other weights"
            taken.append(time.perf_counter() - began)
    here.send("stop")
    os.waitpid(reader, 0)
    return Publications(*(median(taken[1:]) for taken in seconds))  # the first touches pages


def _serve(there: Connection, pages: Tensor, staged: Tensor, reader: Subscription) -> None:
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


def _read(weights: Sequence[Tensor]) -> float:
    """What a reader does to see that weights are there: one element of each tensor."""
    return sum(float(w[0]) for w in weights)
