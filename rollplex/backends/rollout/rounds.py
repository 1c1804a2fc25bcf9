"""What a rollout engine has sampled in the rounds of a step so far: the responses to each of its prompts.

round 0    0 1 2 3        round 1    . 1 . 3        last    . . . 3        the step's    0 1' 2 3''
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rollplex.backends.data.rollout import Rollout


class SampledRounds:
    """The responses to an engine's prompts, those of a later round in place of those before."""

    def __init__(self) -> None:
        self._found: Rollout | None = None

    def take(self, fresh: Rollout, numbers: Sequence[int]) -> Rollout:
        """The round's responses by their numbers among the engine's prompts: ascending, all of them in round 0."""
        fresh = replace(fresh, taken=torch.tensor(list(numbers), dtype=torch.int64))
        self._found = fresh if self._found is None else self._found.with_others(fresh)
        return fresh

    def none(self) -> Rollout:
        """The responses of a round that nothing is left for."""
        return self.all().rows(())

    def all(self) -> Rollout:
        """What the step comes to so far."""
        assert self._found is not None, "round 0 samples for every prompt"
        return self._found
