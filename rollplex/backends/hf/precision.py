"""A float64 model stays float64: transformers casts norms and the vision rotary to float32 by name.

Those casts make a float64 gradient wrong in the eighth digit, so a split could not be compared with a whole pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class KeepDouble(TorchFunctionMode):
    """While active, `x.float()` and `x.to(torch.float32)` return a float64 `x` as it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cast = func is Tensor.float or (func is Tensor.to and args[1:] == (torch.float32,))
        if cast and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def keep_double(model: nn.Module) -> None:
    """Run every norm and vision attention under KeepDouble, also when a checkpoint runs it again in a backward."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "VisionAttention", "VLVisionAttention")):
            module.forward = _under_keep_double(module.forward)


def _under_keep_double(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with KeepDouble():
            return forward(*args, **kwargs)

    return wrapped
