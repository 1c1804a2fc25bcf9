"""The CUDA driver's calls that arenas need, with errors that say what was asked for.

A function of cuda-python returns (status, value, ..). The primary context of the device, which torch uses, is made
current on the calling thread: a thread that has none would be refused (CUDA_ERROR_INVALID_CONTEXT).
"""

from __future__ import annotations

from typing import Any

from rollplex.ir.errors import EngineError, OutOfMemory


def bindings() -> Any:
    """cuda-python's driver API; EngineError where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as err:
        hint = "pip install 'rollplex[cuda]' on a machine with an NVIDIA driver"
        raise EngineError(f"cuda-python is not installed: {err}", hint=hint) from None
    return driver


def check(result: Any, what: str) -> Any:
    """The values behind the status; OutOfMemory or EngineError naming `what` where it is not success."""
    status, *values = result
    if int(status) == 0:
        return values[0] if len(values) == 1 else tuple(values)
    driver = bindings()
    said = driver.cuGetErrorString(status)[1]
    text = f"{what}: {said.decode() if isinstance(said, bytes) else said} ({status.name})"
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        hint = "free memory on this GPU (nvidia-smi shows who has it), or shrink the workload"
        raise OutOfMemory(text, where="device memory", hint=hint)
    raise EngineError(text, where="CUDA driver")


def use(device: int) -> None:
    """Make torch's context of the device current on this thread."""
    import torch  # not by who only asks what GPUs can: it takes seconds

    torch.cuda.set_device(device)
    torch.cuda.current_stream().query()  # creates the context where there is none yet
