"""What a rollout rank asks of the engine that samples, whichever it is: `host` says what every call means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rollplex.backends.data.batch import PromptBatch
from rollplex.backends.data.histories import Histories
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.shard import Shard


@dataclass(frozen=True)
class Served:
    """What a rank serves: its shard of the language model over shared pages, and the tower by Hugging Face name.

    `snapshot` has the shard's regions, `buffer` those that are rebuilt; `kv` is the plan's memory for keys and values,
    uint8, mapped while the plan says so. `live` hears, with every token, how many responses decode and the tokens that
    the youngest of them has since decode began; prefill is none.
    """

    shard: Shard
    snapshot: Tensor
    buffer: Tensor | None
    tower: Mapping[str, Tensor]
    kv: Tensor
    live: Callable[[int, int], None]


class Decoding(Protocol):
    """One step's sampling, which goes on as far as somebody waits for."""

    def until(self, prompts: Sequence[int]) -> Rollout:
        """Decode until the last response to these prompts has ended; they alone, in this order."""
        ...

    def first(self, count: int) -> tuple[Rollout, Rollout]:
        """Decode until `count` prompts have all of their responses: those, and the others as far as they are."""
        ...


class Sampler(Protocol):
    """What samples on one rank; all ranks of a tensor-parallel engine are asked the same and sample the same."""

    def ready(self) -> None:
        """All pages are bound: what depends on them may be made."""
        ...

    def begin(self, seeds: Sequence[int]) -> None:
        """An iteration starts, with new weights: nothing made of the old ones may be used; or another round of it does.

        A seed for each prompt that is to be sampled for next.
        """
        ...

    def decoding(self, prompts: PromptBatch, begun: Rollout | None, version: int) -> Decoding:
        """Sample for these prompts; `begun` are responses that a step has left. New tokens are of `version`."""
        ...

    def turn(self, prompts: PromptBatch | Histories, version: int) -> Rollout:
        """A turn of all trajectories: of the prompts, or of the histories that go on from the turn before."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the sampler measured in the iteration, beside what every engine does."""
        ...

    def close(self) -> None:
        """Leave groups, let everything go."""
        ...
