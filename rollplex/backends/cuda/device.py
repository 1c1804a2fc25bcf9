"""A GPU as the device of a process: VMM arenas, streams, and torch's allocator for everything temporary.

Two processes share a GPU, each with its own allocator: what one keeps for later the other does not get. So working
memory is handed back when the plan unmaps the object that counts it, not at the next shortage.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

import torch

from rollplex.backends.base import Arena
from rollplex.backends.cuda.lanes import StreamLanes
from rollplex.backends.cuda.partition import Partition
from rollplex.backends.cuda.pinned import register
from rollplex.backends.cuda.vmm import CudaMemory
from rollplex.backends.lanes import Tell


class CudaDevice:
    """`Device` number `index` of those that this process sees."""

    def __init__(self, index: int) -> None:
        self.torch = torch.device("cuda", index)
        self.memory = CudaMemory(index)
        _warm(self.torch)

    def pin(self, pool: Arena) -> str:
        register(pool, self.memory.device)
        return ""

    def lanes(self, own: str, patience_s: float, tell: Tell) -> StreamLanes:
        return StreamLanes(self.memory.device, patience_s, tell)

    def working(self) -> AbstractContextManager[AllocatorPeak]:
        return AllocatorPeak(self.torch)

    def settle(self) -> None:
        torch.cuda.synchronize(self.torch)

    def trim(self) -> None:
        torch.cuda.synchronize(self.torch)
        with torch.cuda.device(self.torch):
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch)[0]

    def partition(self, sms: int) -> Partition:
        return Partition(self.memory.device, sms)


def _warm(device: torch.device) -> None:
    """Have cuBLAS take its workspaces, of this thread and of autograd's, which stay: they are no task's memory."""
    x = torch.ones(16, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize(device)


class AllocatorPeak:
    """What torch's allocator handed out at once inside the block, beyond what was out when it began."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes = 0

    def __enter__(self) -> AllocatorPeak:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._before
