"""The prompts of one step as a value that travels: a sequence of `Prompt` with the fields of the graph's `Prompts`."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollplex.backends.data.prompts import Prompt


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Prompts of a step; `eos` are the token ids that end a response.

    `due` are the numbers of those that a round of sampling is for; None: all of them.
    As graph values: tokens and mask [prompt, token], padded on the right; lengths [prompt].
    """

    prompts: tuple[Prompt, ...]
    eos: tuple[int, ...]
    due: frozenset[int] | None = None

    def sampled_for(self, prompts: range) -> list[int]:
        """Those of these numbers whose responses are due."""
        return [p for p in prompts if self.due is None or p in self.due]

    def again(self, others: Mapping[int, Prompt]) -> PromptBatch:
        """The same with other prompts at some numbers, which alone are due."""
        prompts = tuple(others.get(number, prompt) for number, prompt in enumerate(self.prompts))
        return PromptBatch(prompts, self.eos, frozenset(others))

    def of(self, prompts: range) -> PromptBatch:
        """These prompts alone."""
        return PromptBatch(self.prompts[prompts.start : prompts.stop], self.eos)

    def take(self, numbers: Tensor) -> PromptBatch:
        """The prompts of these numbers, in this order."""
        return PromptBatch(tuple(self.prompts[i] for i in numbers.tolist()), self.eos)

    def seen_by(self, prompts: Container[int]) -> PromptBatch:
        """All prompts, with the patches of these alone: nobody runs a prompt of another rank."""
        seen = tuple(p if i in prompts else replace(p, pixel_values=None) for i, p in enumerate(self.prompts))
        return replace(self, prompts=seen)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    @property
    def tokens(self) -> Tensor:
        return pad_sequence([p.input_ids for p in self.prompts], batch_first=True)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(p.input_ids) for p in self.prompts])

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]
