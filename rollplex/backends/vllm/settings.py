"""What vLLM changes in the process that it is imported by, or asks of the machine."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def over_gloo() -> Iterator[None]:
    """Engines that start within the block sum over gloo.

    By itself vLLM takes segments of /dev/shm on a CPU, under a name that is the same in every run: two engines of one
    machine would meet in it, and a killed one leaves it there, where the next finds it and does not start.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    agree = "_all_group_ranks_share_shm_group_name"
    original = getattr(CpuCommunicator, agree)
    setattr(CpuCommunicator, agree, lambda self: False)
    try:
        yield
    finally:
        setattr(CpuCommunicator, agree, original)


@contextmanager
def some_kernels_vary() -> Iterator[None]:
    """From here on kernels of which there is no deterministic form run and warn: vLLM's are not all of that kind."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Within the block `gc.collect` does nothing.

    vLLM ends by looking for garbage among all that was imported, in pages that ranks share: a second of each. Nobody
    needs it: the process ends, too.
    """
    collect = gc.collect
    gc.collect = lambda generation=2: 0
    try:
        yield
    finally:
        gc.collect = collect


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within the block vLLM may set up its process; afterwards threads, accelerator and environment are ours again.

    Its CPU worker takes `torch.set_num_threads` away, silences `torch.accelerator` and preloads an allocator into every
    process that is started later.
    """
    environment, threads = dict(os.environ), torch.set_num_threads
    accelerator = {name: getattr(torch.accelerator, name) for name in ("synchronize", "empty_cache")}
    try:
        yield
    finally:
        torch.set_num_threads = threads
        for name, function in accelerator.items():
            if torch.cuda.is_available():
                setattr(torch.accelerator, name, function)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
