"""The histories of a later turn as a value that travels: a `Prompt` for every trajectory, [prompt, group].

prompt | response 1 | observation | .. | response t | observation        what the response of turn t + 1 follows
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollplex.backends.data.prompts import Prompt


@dataclass(frozen=True, eq=False)
class Histories:
    """Everything before the next response of each trajectory; `eos` are the token ids that end a response."""

    trajectories: tuple[tuple[Prompt, ...], ...]
    eos: tuple[int, ...]

    def of(self, prompts: range) -> Histories:
        """The trajectories of these prompts alone."""
        return Histories(self.trajectories[prompts.start : prompts.stop], self.eos)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __getitem__(self, prompt: int) -> tuple[Prompt, ...]:
        return self.trajectories[prompt]


def extended(history: Prompt, response: Tensor, observation: Tensor) -> Prompt:
    """A history with a response and what is seen then, as text: positions go on one by one.

    The patches stay behind: only what is new of a history is run.
    """
    new = torch.cat([response, observation])
    places = torch.arange(history.next_position, history.next_position + len(new)).expand(3, -1)
    return replace(
        history,
        input_ids=torch.cat([history.input_ids, new]),
        position_ids=torch.cat([history.position_ids, places], dim=1),
        next_position=history.next_position + len(new),
        modality="text",
        pixel_values=None,
        grid_thw=None,
    )
