"""A part of a GPU's SMs: kernels that a block launches run on those alone, in space, beside another client of MPS.

    half = Partition(device=0, sms=64)
    with half():
        model(prompt)

kernels       | GEMM |                | GEMM |      on 64 SMs
collectives            | all-reduce |               on any: they leave the partition, which is entered again

A green context of torch 2.11 and later. Without MPS the same contexts are only time-sliced between processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from rollplex.ir.errors import EngineError


class Partition:
    """So many SMs of a device, rounded up to what the GPU can split off; EngineError where it or torch cannot."""

    def __init__(self, device: int, sms: int) -> None:
        self._context = _green(device, sms)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Work of the block waits for what the current stream has, and the stream then for it."""
        self._context.set_context()
        try:
            with self._collectives():
                yield
        finally:
            self._context.pop_context()

    def _collectives(self) -> AbstractContextManager[object]:
        """A rank alone has none, and is spared a look at every operator."""
        together = dist.is_initialized() and dist.get_world_size() > 1
        return Outside(self._context) if together else nullcontext()


class Outside(TorchDispatchMode):
    """Within the block collectives run outside of a green context, behind what it has, and it goes on behind them.

    NCCL sets the device before it launches, and that is the primary context, which then stays: kernels of the block
    would run on all SMs, on another stream than those before, unordered (github.com/NVIDIA/nccl/issues/1736).
    """

    def __init__(self, context: Any) -> None:
        super().__init__()
        self._context = context

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        self._context.pop_context()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._context.set_context()


def _green(device: int, sms: int) -> Any:
    hint = "sharing.kind: mps"
    try:
        from torch.cuda.green_contexts import GreenContext
    except ImportError:
        what = f"{sms} SMs of GPU {device} cannot be split off: this torch has no green contexts"
        raise EngineError(what, where="CUDA", hint=f"torch 2.11 or later, or {hint}") from None
    try:
        return GreenContext.create(num_sms=sms, device_id=device)
    except RuntimeError as err:
        what = f"{sms} SMs of GPU {device} cannot be split off: {str(err).splitlines()[0]}"
        raise EngineError(what, where="CUDA", hint=hint) from None
