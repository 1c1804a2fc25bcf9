"""How gradients reach the flat memory that the plan has for them, and who is told that they are final.

flat       |embed|layer 0 ..|layer 1 ..|head|        each parameter adds to its slab, and keeps no gradient
told       backward begins: head, of which it knows nothing, is final; then layer 1, layer 0, embed as they are added
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

Tell = Callable[[range], None]
"""Takes elements of the flat gradients that are final."""


class FlatGradients:
    """A role's gradients in flat memory."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self._elements: dict[int, range] = {}
        self._tell: Tell | None = None

    def take(self, parameter: Tensor, slab: Tensor) -> None:
        """From now on add the parameter's gradients to its slab, a view of the flat memory."""
        start = (slab.data_ptr() - self.flat.data_ptr()) // slab.itemsize
        self._elements[id(parameter)] = range(start, start + slab.numel())
        parameter.register_post_accumulate_grad_hook(partial(self._add, slab))

    @contextmanager
    def told(self, tell: Tell) -> Iterator[None]:
        """The block runs one backward, the last that adds anything: `tell` hears of gradients as they become final."""
        self._tell = tell
        try:
            yield
        finally:
            self._tell = None

    def begins(self, edges: Iterable[GradientEdge]) -> None:
        """A backward from these edges is about to begin: what it does not reach is final."""
        if self._tell is None:
            return
        reached = {id(leaf) for leaf in leaves(edges)}
        for parameter, elements in self._elements.items():
            if parameter not in reached:
                self._tell(elements)

    def _add(self, slab: Tensor, parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook runs after accumulation"
        slab.add_(parameter.grad)
        parameter.grad = None
        if self._tell is not None:
            self._tell(self._elements[id(parameter)])


def leaves(edges: Iterable[GradientEdge]) -> Iterator[Tensor]:
    """The parameters that a backward from these edges adds to: the ends of its graph."""
    seen: set[Any] = set()
    waiting: list[Any] = [edge.node for edge in edges]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if (leaf := getattr(node, "variable", None)) is not None:  # autograd's own node, which torch has no name for
            yield leaf
