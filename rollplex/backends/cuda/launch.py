"""Launching a kernel from Python, as a short suffix does hundreds of times: what is set already is not set again.

with on(x.device):                                              free where x's device is the current one, as in a step
    graph.execute(..)
launch(_gated, (rows, pieces), both, out, width, BLOCK=1024)    a kernel of Triton's, likewise
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

_HERE = nullcontext()


def on(device: torch.device) -> AbstractContextManager[object]:
    """The thread's current device is `device` within; cuDNN and Triton launch there."""
    return _HERE if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: int) -> None:
    """Triton's way to call a kernel, of which its types know nothing; the first argument says on which device."""
    with on(arguments[0].device):
        kernel[grid](*arguments, **constants)


@lru_cache(maxsize=256)
def block(n: int) -> int:
    """The least power of two that is not below n: what Triton takes a block of n elements from."""
    return 1 << (n - 1).bit_length()
