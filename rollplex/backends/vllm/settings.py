"""What vLLM reads from the environment, and what it changes in the process that it is imported by.

Settings must be there before the first `import vllm`; nothing that the user has set is overwritten. `FIXED` are those
without which the backend does not work: a run under another value is refused.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rollplex.ir.errors import Problem

FIXED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in our process, over the plan's pages
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # ours is the runner that every version has; newer ones start another by default
}
SETTINGS = FIXED | {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer of the same device wants these cores too
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # multicast over NVLink, and a buffer of 64 MiB that is in no plan
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",  # FlashInfer's, on by default from 0.29, has buffers that are in no plan
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def prepare() -> None:
    """Before vLLM is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def refused() -> Problem | None:
    """A setting of the user's that the backend does not work under."""
    for name, value in FIXED.items():
        if (found := os.environ.get(name, value)) != value:
            return Problem(f"{name} is {found}; engine vllm works under {value} alone", "vllm", f"unset {name}")
    return None


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
