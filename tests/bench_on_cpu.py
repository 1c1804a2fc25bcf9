"""A process of a calibration whose machine is the CPU: a layer's kernels run here, and gloo sums what ranks have.

python tests/bench_on_cpu.py '{"shape": {..}, "gpu": 0, "tp": 2, "rank": 0, "meeting": "prefix-0", ..}'
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from rollplex.backends.cuda.bench import run
from rollplex.backends.cuda.post import Post

ROOT = Path(__file__).parent.parent
ENVIRONMENT: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SMS = 132


def command(post: Post) -> list[str]:
    return [sys.executable, __file__, post.model_dump_json()]


class Cpu:
    """No graphs and no partitions; each process has a share of 4 MiB."""

    device, nbytes = torch.device("cpu"), 4 << 20

    def __init__(self, number: int) -> None:
        self.number = number

    def facts(self) -> dict[str, Any]:
        return {"device": f"CPU {self.number}", "sms": SMS, "torch": torch.__version__, "cuda": "none"}

    def done(self) -> None:
        """It is when a call returns."""

    def release(self) -> None:
        """Torch does."""

    def captured(self, work: Callable[[], object]) -> Callable[[], None]:
        def again() -> None:
            work()

        return again

    def on(self, sms: int) -> AbstractContextManager[None]:
        return nullcontext()

    def seconds(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


if __name__ == "__main__":
    run(Post.model_validate_json(sys.argv[1]), Cpu)
