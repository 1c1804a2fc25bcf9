"""A prompt as tensors: token ids, patches of its video or image, and mrope positions.

<|im_start|>user\\n<|vision_start|><|video_pad|>*k<|vision_end|>QUESTION<|im_end|>\\n<|im_start|>assistant\\n
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Modality = Literal["video", "image", "text"]


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt, ready for the model; prefix = the first P - 1 tokens, suffix = the last one and the response.

    input_ids [P] int64; pixel_values [patches, patch_dim] float32 or None; grid_thw [1, 3] int64 or None, in patches;
    position_ids [3, P] int64, mrope; `next_position` is where the first response token stands on all three axes.
    `response_lengths` are the tokens of each of its responses where the data set says so (rows.py), else empty.
    """

    row: str
    question: str
    answer: str
    input_ids: Tensor
    position_ids: Tensor
    next_position: int
    modality: Modality = "text"
    pixel_values: Tensor | None = None
    grid_thw: Tensor | None = None
    seconds_per_grid: float = 1.0
    response_lengths: tuple[int, ...] = ()

    def on(self, device: torch.device, dtype: torch.dtype) -> Prompt:
        """The same prompt on the device where a model of this dtype runs; patches travel as the tower takes them."""
        if self.input_ids.device == device:
            return self
        names = ("input_ids", "position_ids", "grid_thw")
        tensors = {name: getattr(self, name) for name in names}
        moved = {name: x if x is None else x.to(device) for name, x in tensors.items()}
        pixels = None if self.pixel_values is None else self.pixel_values.to(dtype).to(device)
        return replace(self, **moved, pixel_values=pixels)

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prefix: all but the last."""
        return self.input_ids.shape[0] - 1

    @property
    def patches(self) -> int:
        """Vision patches of the prompt, 0 for text."""
        return 0 if self.pixel_values is None else self.pixel_values.shape[0]
