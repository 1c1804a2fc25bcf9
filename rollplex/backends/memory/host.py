"""The host as the device of a process: its pages, its threads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from rollplex.backends.base import Arena
from rollplex.backends.lanes import Tell, ThreadLanes
from rollplex.backends.memory.available import available_bytes
from rollplex.backends.memory.live import LiveBytes
from rollplex.backends.memory.memfd import HostMemory, lock


class HostDevice:
    """`Device` of an engine that computes on the CPU."""

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.memory = HostMemory()

    def pin(self, pool: Arena) -> str:
        return lock(pool)

    def lanes(self, own: str, patience_s: float, tell: Tell) -> ThreadLanes:
        return ThreadLanes(own, patience_s, tell)

    def working(self) -> AbstractContextManager[LiveBytes]:
        return LiveBytes()

    def settle(self) -> None:
        """Work on a CPU is over when its call returns."""

    def trim(self) -> None:
        """What is freed is the system's again."""

    def free_bytes(self) -> int:
        return available_bytes()

    def partition(self, sms: int) -> type[nullcontext[None]]:
        """A CPU's cores are shared out by the system: nothing is held to a part of them."""
        return nullcontext
