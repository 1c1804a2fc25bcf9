"""A part of a GPU's SMs: kernels that a block launches run on those alone, in space, beside another client of MPS.

    half = Partition(device=0, sms=64)
    with half():
        model(prompt)

A green context of torch 2.11 and later. Without MPS the same contexts are only time-sliced between processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
            yield
        finally:
            self._context.pop_context()


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
