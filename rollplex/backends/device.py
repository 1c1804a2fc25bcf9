"""What lies under the objects of a process: the memory of a host, or a GPU. Engines and runtime cannot tell which.

                host                              GPU
memory          memfd pages                       the driver's VMM handles
pin             mlock                             registered with the driver: copies run at the link's rate
lanes           threads                           streams
working         storages that operators make      the allocator's own peak
settle          nothing                           wait for the kernels that were launched
trim            nothing                           hand cached blocks back: other processes share the GPU
free_bytes      what programs can still take      what the driver has
partition       nothing: a core is a core         kernels of a block on so many SMs (green contexts, under MPS)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from rollplex.backends.base import Arena, Memory
from rollplex.backends.lanes import Lanes, Tell
from rollplex.ir.job import Job
from rollplex.ir.placement import cuda_device


class Peak(Protocol):
    """The most bytes that a stretch of code has held at once, beyond what was there; known when it is over."""

    @property
    def peak_bytes(self) -> int: ...


class Device(Protocol):
    """The device of one process; `torch` is where its tensors lie."""

    @property
    def torch(self) -> torch.device: ...

    @property
    def memory(self) -> Memory:
        """Where arenas come from."""
        ...

    def pin(self, pool: Arena) -> str:
        """Lock a mapped host arena in RAM until it is gone; "" or why that was refused."""
        ...

    def lanes(self, own: str, patience_s: float, tell: Tell) -> Lanes:
        """Lanes of work that overlaps; `own` is the caller's, `tell` hears what a lane begins."""
        ...

    def working(self) -> AbstractContextManager[Peak]:
        """Measures what the block allocates."""
        ...

    def settle(self) -> None:
        """Return when everything that was asked of the device is done, so that others may read it."""
        ...

    def trim(self) -> None:
        """Keep no free memory for later."""
        ...

    def free_bytes(self) -> int:
        """What could be mapped now, whoever asks."""
        ...

    def partition(self, sms: int) -> Callable[[], AbstractContextManager[None]]:
        """A part of the device: what a block under it computes runs on so many SMs; EngineError where it cannot be."""
        ...


def device_of(job: Job, gpu: int) -> Device:
    """The device of the rank on GPU `gpu` of the node; EngineError where there is none."""
    if job.on_host:
        from rollplex.backends.memory.host import HostDevice

        return HostDevice()
    from rollplex.backends.cuda.device import CudaDevice

    return CudaDevice(cuda_device(job, gpu))
