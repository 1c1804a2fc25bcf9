"""What engines of one GPU need in their environment, so that they run side by side on it and to the same bits.

Nothing of NCCL: what the user has set there reaches every process, and what is left to NCCL (NVLink multicast) works
beside MPS and over memory that is mapped, as its buffers are its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollplex.ir.job import Job

_SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # cuBLAS is deterministic with this alone


@contextmanager
def sharing(job: Job) -> Iterator[dict[str, str]]:
    """Variables of the engine processes while the block runs: on GPUs, of clients of an MPS daemon.

    EngineError where there is none and none can be started.
    """
    if job.on_host:
        yield {}
        return
    from rollplex.backends.cuda.mps import Mps

    with Mps.running() as mps:
        yield {**mps.environment(), **_SAME_BITS}
