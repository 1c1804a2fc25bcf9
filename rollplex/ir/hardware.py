"""GPUs by the figures that plans need: bytes that software can use, bandwidths, and compute.

load_gpu("h800").usable_bytes == round(79.1 * 2**30)
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from rollplex.ir.errors import JobError

# Software sees less than the capacity on the data sheet: 98.5 to 99.1 % of it read as GiB in the logs we have (A100-40
# 39.4 of 40, H100 79.1 of 80, H200 139.8 of 141). A GPU without a log gets the least of these.
UNLOGGED_USABLE_SHARE = 0.985

# Of half the two-way PCIe figure, what pinned copies reach in both directions at once (H200: 50.5 of 64 GB/s).
HOST_LINK_SHARE = 0.79

# MiB of a GPU that a process takes beside what it allocates (benchmarks/results/context_h200.md): its CUDA context with
# the kernels of GEMMs and attention, 727 alone and 760 with its half of the MPS server (a vLLM that sleeps at TP1 was
# seen to keep 774); NCCL's kernels and buffers with its first communicator, and the buffers of each further one.
CONTEXT_MIB = 774
FIRST_COMMUNICATOR_MIB, COMMUNICATOR_MIB = 840, 485

# MiB of host memory of an engine process beside pinned memory: Python, torch, transformers, CUDA, NCCL with its shared
# segments (benchmarks/results/host_memory_h200.md).
PROCESS_HOST_MIB = 1300


def communication_mib(communicators: int) -> int:
    """MiB that NCCL keeps in a process with this many communicators of more than one GPU."""
    return FIRST_COMMUNICATOR_MIB + (communicators - 1) * COMMUNICATOR_MIB if communicators else 0


@dataclass(frozen=True)
class Gpu:
    """One device; GB and TB are decimal, GiB binary, rates are per second, compute is dense bf16.

    On a `hopper` one cuDNN attends what is one long sequence.
    """

    name: str
    hbm_gb: float
    bandwidth_tb_s: float
    tflops_bf16: float
    nvlink_gb_s: float
    pcie_gb_s: float
    sms: int
    logged_usable_gib: float | None = None
    note: str = ""
    page_bytes: int = 2 * 2**20
    capacity_from_job: bool = False
    measured_link_gb_s: float | None = None
    hopper: bool = False

    def is_called(self, found: str) -> bool:
        """Whether a device's own name, `NVIDIA H100 80GB HBM3`, is one of this GPU."""
        return self.name.split("-")[0].lower() in re.split(r"[ -]", found.lower())

    @property
    def usable_gib(self) -> float:
        """GiB that software can allocate: from a log, else estimated (`usable_source` tells which)."""
        return self.logged_usable_gib or self.hbm_gb * UNLOGGED_USABLE_SHARE

    @property
    def usable_source(self) -> str:
        """Where `usable_gib` comes from."""
        if self.capacity_from_job:
            return "the job's cluster.capacity_gib"
        if self.logged_usable_gib:
            return "read in a log"
        return f"estimated, {UNLOGGED_USABLE_SHARE} x {self.hbm_gb:g}; no log at hand"

    @property
    def usable_bytes(self) -> int:
        """`usable_gib` in bytes."""
        return round(self.usable_gib * 2**30)

    @property
    def host_link_gb_s(self) -> float:
        """GB/s between HBM and pinned host memory, each way, with both directions busy."""
        return self.measured_link_gb_s or self.pcie_gb_s / 2 * HOST_LINK_SHARE


GPUS: tuple[Gpu, ...] = (
    Gpu("A100-40", 40, 1.555, 312, 600, 64, 108, 39.4),
    Gpu("A100-80", 80, 2.039, 312, 600, 64, 108, 79.3, "usable size from A800-80, the same memory"),
    Gpu("A800-80", 80, 2.039, 312, 400, 64, 108, 79.3),
    Gpu("H100", 80, 3.35, 989, 900, 128, 132, 79.1, hopper=True),
    Gpu("H800", 80, 3.35, 989, 400, 128, 132, 79.1, "usable size from H100, the same memory", hopper=True),
    Gpu("H200", 141, 4.8, 989, 900, 128, 132, 139.8, hopper=True),
    Gpu("H20", 96, 4.0, 148, 900, 128, 78, hopper=True),
    # Smaller cards of public reports; over PCIe, which is what stands under NVLink for a card that has none.
    Gpu("A10", 24, 0.6, 125, 64, 64, 72, 21.99, "no NVLink"),
    Gpu("A6000", 48, 0.768, 154.8, 112.5, 64, 84, None, "NVLink bridge of two cards"),
    Gpu("B200", 180, 8.0, 2250, 1800, 128, 148, None, "host link of the HGX board; not in the vendor table"),
    # The host backend: a plan for CPU processes. Its capacity is whatever the job says; the rates only scale estimates.
    Gpu("cpu", 0, 0.02, 0.1, 10, 20, 1, None, "host backend; rates are rough", 4096, capacity_from_job=True),
)


def load_gpu(name: str) -> Gpu:
    """The GPU of this name, in any case."""
    known = {gpu.name.lower(): gpu for gpu in GPUS}
    if gpu := known.get(name.lower()):
        return gpu
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = " or ".join(known[c].name for c in close) or "one of " + ", ".join(gpu.name for gpu in GPUS)
    raise JobError(f"no GPU `{name}`", hint=hint)
