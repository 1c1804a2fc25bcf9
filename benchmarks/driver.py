"""Bytes of a GPU that are in use, as its driver counts them, while a block runs: of all processes, made or mapped.

with Driver() as driver:           every 10 ms, by NVML: no context is made to ask
    ..
driver.before, driver.within(start_ns, stop_ns)
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from importlib import import_module
from typing import Any

from rollplex.backends.cuda.machine import cards
from rollplex.ir.errors import RunError

POLL_S = 0.01


class Driver:
    """Samples of a GPU by its CUDA number; times are CLOCK_MONOTONIC nanoseconds, those of a run's trace.

    RunError where there is no such GPU, or nobody to ask.
    """

    def __init__(self, gpu: int = 0) -> None:
        self._nvml = nvml()
        seen = cards()
        if gpu >= len(seen):
            what = f"CUDA device {gpu} is not there: this machine has {len(seen)}"
            raise RunError(what, where="GPU", hint="set run.devices, CUDA_VISIBLE_DEVICES, or cluster.gpus_per_node")
        self._gpu = self._nvml.nvmlDeviceGetHandleByIndex(int(seen[gpu].index))
        self.times: list[int] = []
        self.used: list[int] = []
        self.before = self.now()
        self._over = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def now(self) -> int:
        """Bytes in use."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._gpu).used)

    def __enter__(self) -> Driver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def within(self, start_ns: int, stop_ns: int) -> list[int]:
        """What was in use, sample by sample."""
        return self.used[bisect_left(self.times, start_ns) : bisect_left(self.times, stop_ns)]

    def _poll(self) -> None:
        try:
            while not self._over.wait(POLL_S):
                self.times.append(time.monotonic_ns())
                self.used.append(self.now())
        except self._nvml.NVMLError as err:  # told when the block is over: a run that nobody watched proves nothing
            self._failed = RunError(f"NVML did not answer: {err}", where="GPU", hint="run it again")


def nvml() -> Any:
    """NVIDIA's management library, begun; RunError where it is not there."""
    hint = "run where there is a GPU, with package nvidia-ml-py installed"
    try:
        found: Any = import_module("pynvml")
    except ImportError:
        raise RunError("package nvidia-ml-py is not installed", where="GPU", hint=hint) from None
    try:
        found.nvmlInit()
    except found.NVMLError as err:
        raise RunError(f"NVML does not answer: {err}", where="GPU", hint=hint) from None
    return found
