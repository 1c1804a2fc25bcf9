"""How gradients reach the flat memory that the plan has for them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def adder(slab: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's final gradient to its slab, and leaves the parameter none."""

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook runs after accumulation"
        slab.add_(parameter.grad)
        parameter.grad = None

    return add
