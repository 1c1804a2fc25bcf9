"""What a training rank asks of a role's model, whichever engine runs it: its tasks, and where its parameters lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rollplex.ir.spec import Part

Prefix = Any  # what `prefix` returns: `kv` is the filled part of its slot, `attached` whether it has a backward


class RoleModel(Protocol):
    """One role's model on one rank; every parameter is a view of planned objects."""

    @property
    def objects(self) -> Mapping[Part, str]:
        """The planned object of each part's weights."""
        ...

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """This rank's parameters by name."""
        ...

    @property
    def trained(self) -> tuple[tuple[str, int], ...]:
        """Name and elements of each parameter that the update changes, in the flat order of the optimizer's state."""
        ...

    def counted(self, name: str) -> bool:
        """Whether this rank counts the parameter in the gradient's norm: of its tensor-parallel group one rank does."""
        ...

    def sources(self, name: str) -> tuple[str, ...]:
        """The Hugging Face tensors that a parameter is made of."""
        ...

    def boundary_shape(self, prefix_tokens: int) -> tuple[int, int, int, int, int]:
        """(layers, 2 for K and V, KV heads of this rank, prefix_tokens, head_dim)."""
        ...

    def prefix(self, prompt: Any, slot: Tensor, attached: bool, saved: Any, before: Sequence[Tensor]) -> Prefix:
        """Keys and values of all but the last prompt token, into `slot`; OutOfMemory when it is too small.

        Of a later turn's history `before` are the pieces made of its beginning: only what is behind them is run.
        """
        ...

    def logprobs(
        self, prefix: Prefix, kv: Tensor, responses: Sequence[Tensor], temperature: float, recompute: bool
    ) -> Tensor:
        """Log-probabilities [responses, tokens] over a prefix, under the caller's grad mode."""
        ...

    def values(self, prefix: Prefix, kv: Tensor, responses: Sequence[Tensor], recompute: bool) -> Tensor:
        """A critic's values [responses, tokens] over a prefix, under the caller's grad mode."""
        ...

    def scores(self, prefix: Prefix, kv: Tensor, responses: Sequence[Tensor], recompute: bool) -> Tensor:
        """A reward model's scores [responses] over a prefix, under the caller's grad mode."""
        ...

    def whole(self, prompt: Any, response: Tensor, head: str, temperature: float, recompute: bool) -> Tensor:
        """What the head says of one response behind a prompt of its own: [1, tokens], a score [1]."""
        ...

    def prefix_backward(self, prefix: Prefix, kv_grads: Tensor, begins: Callable[[Any], None]) -> None:
        """Gradients of the prefix from d(loss)/d(kv); once for each attached prefix.

        `begins` gets the edges of the graph that the backward starts from, before it does.
        """
        ...

    def accumulate(self, into: Any) -> None:
        """From now on add gradients to flat memory, end to end in the order of `trained`, as they become final."""
        ...

    def fill(self) -> None:
        """Give the policy's weights on this rank their initial values, where they lie."""
        ...

    def fill_master(self, masters: Mapping[str, Tensor]) -> None:
        """Give the master copies of these trained parameters, each flat and whole, their initial values."""
        ...

    def initialise(self, part: Part, flat: Tensor) -> None:
        """Give flat memory the initial values of a part, as its object holds them."""
        ...

    def send(self, peer: Tensor) -> None:
        """Write this rank's slabs of the rollout shard into a peer's flat pages of it; on a GPU that is queued."""
        ...

    def rebuild(self, buffer: Tensor) -> None:
        """Copy and permute into `buffer` what the rollout engine cannot alias."""
        ...

    def save(self, path: Path) -> None:
        """Write the weights as a Hugging Face directory; every rank of a tensor-parallel group calls it."""
        ...
