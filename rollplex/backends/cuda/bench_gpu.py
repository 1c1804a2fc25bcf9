"""The GPU of a process that measures: its memory, its SMs, when it is done, graphs of what it is to launch.

gpu = Gpu(1)
step = gpu.captured(lambda: proxy.decode(hidden, cache))      step() launches it all at once
with gpu.on(64):                                              on 64 SMs; on(0): no partition
    proxy.prefix(hidden)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rollplex.backends.cuda.bench_rates import timed
from rollplex.backends.cuda.partition import Partition


class Machine(Protocol):
    """What runs the kernels."""

    @property
    def device(self) -> torch.device:
        """Where tensors lie."""
        ...

    @property
    def nbytes(self) -> int:
        """Its memory."""
        ...

    def facts(self) -> dict[str, Any]:
        """Its name and SMs, and the versions."""
        ...

    def done(self) -> None:
        """Returns when it has nothing to do any more."""
        ...

    def release(self) -> None:
        """Memory that nothing uses goes back."""
        ...

    def captured(self, work: Callable[[], object]) -> Callable[[], None]:
        """What launches that work again."""
        ...

    def on(self, sms: int) -> AbstractContextManager[None]:
        """Work of the block has so many SMs; 0: no partition."""
        ...

    def seconds(self, work: Callable[[], object]) -> float:
        """Of that work, by itself."""
        ...


class Gpu:
    """CUDA device `number`, from now on the process's own."""

    def __init__(self, number: int) -> None:
        self.device = torch.device("cuda", number)
        torch.cuda.set_device(self.device)
        self._partitions: dict[int, Partition] = {}

    @property
    def nbytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).total_memory

    def facts(self) -> dict[str, Any]:
        found = torch.cuda.get_device_properties(self.device)
        return {
            "device": found.name,
            "sms": found.multi_processor_count,
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
        }

    def done(self) -> None:
        torch.cuda.synchronize()

    def release(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def captured(self, work: Callable[[], object]) -> Callable[[], None]:
        """By a graph, behind runs that warm up on another stream."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=_others_may()):
            work()
        return graph.replay

    def on(self, sms: int) -> AbstractContextManager[None]:
        if not sms:
            return nullcontext()
        if sms not in self._partitions:
            self._partitions[sms] = Partition(self.device.index, sms)
        return self._partitions[sms]()

    def seconds(self, work: Callable[[], object]) -> float:
        return timed(work)


def _others_may() -> str:
    """What NCCL's watchdog asks of the GPU in a thread of its own is no fault of a capture in this one."""
    return "thread_local" if dist.is_initialized() else "global"
