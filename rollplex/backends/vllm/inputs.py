"""A prompt of the data set as vLLM's engine takes it: token ids with pads repeated once, patches, grid.

What a processor would make is there already, so nothing is decoded, resized or expanded a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.digest import digest

POSITIONS = "rollplex_positions"
_FIELDS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


class EngineInput:
    """A prompt for the requests of all its responses; `pads` are the pad tokens by modality."""

    def __init__(self, prompt: Prompt, pads: Mapping[str, int]) -> None:
        self._prompt, self._ids = prompt, prompt.input_ids.tolist()
        self._media: dict[str, Any] = {}
        if prompt.pixel_values is not None:  # their digest takes as long as some tokens do: once for all responses
            kind = prompt.modality
            hashes, places = [_identity(prompt)], [_placeholder(prompt, pads[kind])]
            self._media = {"mm_hashes": {kind: hashes}, "mm_placeholders": {kind: places}}

    def with_response(self, tokens: Sequence[int]) -> dict[str, Any]:
        """The prompt, and behind it the tokens of a response that goes on."""
        prompt, ids = self._prompt, [*self._ids, *tokens]
        if prompt.pixel_values is None or prompt.grid_thw is None:
            return {"type": "token", "prompt_token_ids": ids}
        kind, grid = prompt.modality, prompt.grid_thw
        pixels, size = _FIELDS[kind]
        data: Any = {pixels: prompt.pixel_values, size: grid, POSITIONS: _positions(prompt, len(tokens))[None]}
        fields = {
            pixels: MultiModalFieldConfig.flat_from_sizes(kind, grid.prod(-1)),
            size: MultiModalFieldConfig.batched(kind, keep_on_cpu=True),
            POSITIONS: MultiModalFieldConfig.batched(kind, keep_on_cpu=True),
        }
        items = MultiModalKwargsItems.from_hf_inputs(data, fields)
        return {"type": "multimodal", "prompt_token_ids": ids, "mm_kwargs": items, **self._media}


def _positions(prompt: Prompt, more: int) -> Tensor:
    """[3, tokens + 1]: of every token, and where the next one stands."""
    behind = prompt.next_position + torch.arange(more + 1)
    return torch.cat([prompt.position_ids, behind.expand(3, -1)], dim=1)


def _placeholder(prompt: Prompt, pad: int) -> PlaceholderRange:
    """Where the pads of the one image or video stand."""
    at = (prompt.input_ids == pad).nonzero()[:, 0].tolist()
    assert at == list(range(at[0], at[0] + len(at))), f"{prompt.row}: pads in more than one place"
    return PlaceholderRange(offset=at[0], length=len(at))


def _identity(prompt: Prompt) -> str:
    """Equal for equal patches: prompts about one video share what the tower makes of it."""
    assert prompt.pixel_values is not None
    assert prompt.grid_thw is not None
    return f"{prompt.modality}-{digest(prompt.pixel_values, prompt.grid_thw)}"
