"""Responses that a step leaves unfinished, as they lie in the plan's object until the next step goes on with them.

rollout.carried    tokens int32 | log-probabilities float32 | snapshots int32     each [prompt, response, token]

A token's snapshot is the number of the step whose weights sampled it, counted from 1; 0 is no token: lengths follow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollplex.backends.data.rollout import Rollout


class Unfinished:
    """Room for responses to at most `prompts` prompts in flat memory of the caller's; empty until something is put."""

    def __init__(self, memory: Tensor, prompts: int, n: int, max_tokens: int) -> None:
        """`memory` is uint8, at least 12 bytes for each token."""
        shape = (prompts, n, max_tokens)
        size = 4 * torch.Size(shape).numel()
        assert memory.dtype == torch.uint8
        assert memory.numel() >= 3 * size, f"{memory.numel()} bytes for {3 * size}"
        parts = memory[: 3 * size].split(size)
        types = (torch.int32, torch.float32, torch.int32)
        self._tokens, self._logprobs, self._versions = (
            part.view(dtype).view(shape) for part, dtype in zip(parts, types, strict=True)
        )

    def put(self, left: Rollout) -> None:
        """Keep what a step has left, and nothing of what was there before."""
        assert left.tokens.shape == self._tokens.shape, f"{left.tokens.shape} left, room for {self._tokens.shape}"
        self._tokens.copy_(left.tokens)
        self._logprobs.copy_(left.logprobs)
        self._versions.copy_(left.versions)

    def take(self) -> Rollout | None:
        """What was put last; None before the first step has left anything."""
        lengths = (self._versions > 0).sum(-1)
        if not lengths.any():
            return None
        tokens, versions = self._tokens.to(torch.int64), self._versions.clone()
        return Rollout(tokens, lengths, self._logprobs.clone(), torch.arange(len(lengths)), versions)
