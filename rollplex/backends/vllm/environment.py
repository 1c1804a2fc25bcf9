"""What vLLM reads from the environment.

Settings must be there before the first `import vllm`; nothing that the user has set is overwritten. `FIXED` are those
without which the backend does not work: a run under another value is refused.
"""

from __future__ import annotations

import os

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
