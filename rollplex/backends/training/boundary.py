"""A prefix between its forward and its backward: its keys and values in the boundary, its saved state, its edges.

result = materialise(model, prompt, slot, forward, attached=True, saved=policy)    keys and values are now in the slot
kv = boundary_leaf(result.kv)                                                    suffix work reads it, leaves kv.grad
later = materialise(.., before=[kv])                                             the piece of a later turn extends it
prefix_backward(result, kv.grad)                                                 the rest of the backward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.training.attention import by_layer, causal_after
from rollplex.backends.training.saved import AddressRanges, SavedPolicy, SavedState
from rollplex.ir.errors import OutOfMemory

Begins = Callable[[Sequence[GradientEdge]], None]
Forward = Callable[["Capture", bool], None]
"""Runs a prompt's prefix through an engine's layers, which hand the capture their keys and values; may recompute."""


@dataclass
class PrefixResult:
    """One prompt's prefix, materialised: `kv` [layers, 2, kv_heads, prefix, head_dim] is the filled part of the slot.

    `before` are the pieces of earlier turns that it extends: then `kv` is of the tokens behind them alone.

    Attached results also hold what the backward starts from: gradient edges, never a second copy of keys or values.
    """

    model: Any
    prompt: Prompt
    kv: Tensor
    saved: SavedPolicy
    forward: Forward
    before: tuple[Tensor, ...] = ()
    edges: list[GradientEdge | None] = field(default_factory=list)
    state: SavedState | None = None
    attached: bool = False

    @property
    def saved_nbytes(self) -> int:
        """Measured bytes of saved state (0 for a detached or dropped prefix)."""
        return self.state.nbytes if self.state else 0


def materialise(
    model: Any,
    prompt: Prompt,
    slot: Tensor,
    forward: Forward,
    *,
    attached: bool,
    saved: SavedPolicy | None,
    before: Sequence[Tensor] = (),
) -> PrefixResult:
    """Run prompt[:-1] by `forward` and write every layer's keys and values into `slot`, which may be longer.

    `model.parameters()` are weights, which are not saved state. Raises OutOfMemory when the prompt is longer than the
    slot or its saved state larger than the policy's pool.
    """
    policy = saved or SavedPolicy()
    kv = _filled_part(slot, prompt, sum(piece.shape[3] for piece in before))
    result = PrefixResult(model, prompt, kv, policy, forward, tuple(before), attached=attached)
    if attached and policy.where != "dropped":
        _run_attached(result, kv)
    else:
        with torch.no_grad():
            forward(Capture(kv, kv.shape[0], before), False)
    return result


def prefix_backward(result: PrefixResult, kv_grads: Tensor, begins: Begins = lambda edges: None) -> None:
    """Accumulate parameter gradients from d(loss)/d(kv), a tensor shaped like `result.kv`; once for each result.

    One backward carries dK and dV of every layer into the language prefix, the merger and the vision tower; `begins`
    gets the edges that it starts from. A dropped prefix is run again first; its keys and values are written nowhere.
    """
    assert result.attached, "a detached prefix has no backward"
    if result.saved.where == "dropped":
        _run_attached(result, None)
    assert result.edges, "a prefix backward runs once"
    grads = [g[None] for layer in kv_grads.unbind(0) for g in layer.unbind(0)]
    wanted = [(e, g) for e, g in zip(result.edges, grads, strict=True) if e is not None]
    begins([e for e, _ in wanted])
    torch.autograd.backward([e for e, _ in wanted], [g for _, g in wanted])
    result.edges, result.state = [], None


def boundary_leaf(kv: Tensor) -> Tensor:
    """The boundary as an autograd leaf over the same memory; its `.grad` is what `prefix_backward` wants."""
    return kv.detach().requires_grad_()


def _filled_part(slot: Tensor, prompt: Prompt, before: int) -> Tensor:
    tokens = prompt.prefix_tokens - before
    if tokens > slot.shape[3]:
        raise OutOfMemory(
            f"the prompt has {tokens} {'new' if before else 'prefix'} tokens, its boundary slot {slot.shape[3]}",
            where=prompt.row,
            hint="raise workload.prompt_tokens, or lower frames or max_pixels",
        )
    if slot.is_cuda:  # its kernels read the rest of the slot, though it weighs nothing: it must be finite
        slot[:, :, :, tokens:].zero_()
    return slot[:, :, :, :tokens]


def _run_attached(result: PrefixResult, kv: Tensor | None) -> None:
    prompt = result.prompt
    inputs = [t for t in (prompt.input_ids, prompt.pixel_values) if t is not None]
    state = SavedState(result.saved, AddressRanges([*result.model.parameters(), *inputs, *result.before]), prompt.row)
    capture = Capture(kv, result.kv.shape[0], result.before)
    with state.hooks(), torch.enable_grad():
        result.forward(capture, result.saved.recompute == "full")
    result.edges, result.state = capture.edges, state


class Capture:
    """Copies each layer's keys and values out and remembers where their gradients enter the graph.

    `start` is the first token that is run: those of the pieces before it are attended to.

    A checkpointed layer comes here again in the backward; by then the slot may belong to someone else, so only the
    first visit writes.
    """

    def __init__(self, kv: Tensor | None, layers: int, before: Sequence[Tensor] = ()) -> None:
        self.kv = kv
        self.layers = layers
        self.start = sum(piece.shape[3] for piece in before)
        self._before = by_layer(before) if before else [[] for _ in range(layers)]
        self.visited = 0
        self.edges: list[GradientEdge | None] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if layer == self.visited:
            self.visited += 1
            self._take(layer, key, value)
        return query if layer == self.layers - 1 else causal_after(query, key, value, self._before[layer], scale)

    def _take(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.edges += [get_gradient_edge(t) if t.requires_grad else None for t in (key, value)]
        if self.kv is not None:
            self.kv[layer, 0].copy_(key[0].detach())
            self.kv[layer, 1].copy_(value[0].detach())
