"""What a rollout engine hands over: sampled tokens, their lengths, and the log-probabilities they were sampled with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rollout:
    """tokens [prompts, n, max_tokens] int64 with the end token as last token of a response that ended, 0 beyond;
    lengths [prompts, n]; logprobs like tokens, of the sampled tokens under the temperature they were sampled with.
    taken [prompts] int64: the number of each prompt among all that were sampled for, ascending within an engine.
    versions like tokens, int32: the step, counted from 1, whose weights sampled each token; 0 where there is none.
    """

    tokens: Tensor
    lengths: Tensor
    logprobs: Tensor
    taken: Tensor
    versions: Tensor

    @property
    def mask(self) -> Tensor:
        """Which positions hold a token [prompts, n, max_tokens]."""
        return torch.arange(self.tokens.shape[-1]) < self.lengths[..., None]

    def of(self, prompts: range) -> Rollout:
        """The responses to these prompts alone."""
        cut = slice(prompts.start, prompts.stop)
        return self._each(lambda x: x[cut])

    def take(self, places: Tensor) -> Rollout:
        """The responses to the prompts at these places, in this order."""
        return self._each(lambda x: x[places])

    def with_others(self, others: Rollout) -> Rollout:
        """The same with the responses to the prompts that `others` has taken in place of those at their numbers."""
        pairs = zip(self.fields, others.fields, strict=True)
        return Rollout(*(mine.index_copy(0, others.taken, theirs) for mine, theirs in pairs))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Rollout:
        return Rollout(*(change(x) for x in self.fields))

    @property
    def fields(self) -> tuple[Tensor, ...]:
        """Every tensor, each with the prompts first."""
        return (self.tokens, self.lengths, self.logprobs, self.taken, self.versions)

    def rows(self, prompts: Sequence[int]) -> Rollout:
        """The responses to these prompts, in this order."""
        return self.take(torch.tensor(list(prompts), dtype=torch.int64))

    @classmethod
    def joined(cls, parts: Sequence[Rollout]) -> Rollout:
        """The parts of several engines, in the order of their prompts."""
        fields = zip(*(p.fields for p in parts), strict=True)
        return cls(*(torch.cat(same) for same in fields))

    def same_as(self, other: Rollout) -> bool:
        """Whether both hold the same tokens; log-probabilities may differ by the order of sums."""
        pairs = ((self.tokens, other.tokens), (self.lengths, other.lengths), (self.taken, other.taken))
        return all(torch.equal(a, b) for a, b in pairs)

    def responses(self, prompt: int) -> list[Tensor]:
        """The n responses of a prompt, each as long as it is."""
        return [t[:k] for t, k in zip(self.tokens[prompt], self.lengths[prompt].tolist(), strict=True)]
