"""From a row of a data set to a prompt: decode the media, fill the chat template, tokenize, number the positions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rollplex.backends.data.prompts import Modality, Prompt
from rollplex.backends.data.rows import Row
from rollplex.backends.data.tokens import PADS
from rollplex.backends.data.video import Clip, VisionSpec, decode_image, decode_video, to_patches
from rollplex.backends.hf.model import build_model
from rollplex.ir.errors import DataError, JobError, Problem


class PromptMaker:
    """Turns rows of a data set into prompts: `PromptMaker(config, tokenizer, spec)(row)`.

    Needs no weights: positions come from transformers' get_rope_index on a model without any. The frames of the last
    `clips_kept` media files stay decoded, for data sets that ask several questions about one video.
    """

    def __init__(
        self, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, spec: VisionSpec, clips_kept: int = 64
    ) -> None:
        self.spec = spec
        self._decode_video = lru_cache(clips_kept)(decode_video)
        self._decode_image = lru_cache(clips_kept)(decode_image)
        self.tokenizer = tokenizer
        self.model = build_model(config, torch.float32)
        self._check_vocabulary(config)

    def __call__(self, row: Row) -> Prompt:
        """Decode the row's media and tokenize its question; DataError when the media cannot be used."""
        modality, clip = self._media(row)
        if clip is None:
            return self._assemble(row, modality, None, None, 1.0)
        try:
            pixels, grid = to_patches(clip, self.spec)
        except DataError as err:
            raise DataError(*(p.what for p in err.problems), where=row.video or row.image) from None
        seconds = clip.seconds / len(clip.frames) * self.spec.temporal_patch_size
        return self._assemble(row, modality, pixels, grid, seconds)

    def text(self, question: str, modality: Modality, vision_tokens: int) -> str:
        """The chat template's text with the pad token repeated for every merged patch."""
        content: list[dict[str, str]] = [{"type": "text", "text": question}]
        if modality != "text":
            content.insert(0, {"type": modality})
        messages = [{"role": "user", "content": content}]
        text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        pad = PADS.get(modality, "")
        return text.replace(pad, pad * vision_tokens) if pad else text

    def message(self, text: str, ended: bool) -> Tensor:
        """Token ids of a user's next message behind a response, up to where the model answers.

        They end the response, unless it has ended itself.
        """
        first: list[dict[str, str]] = [{"role": "user", "content": "?"}]
        said = self._rendered(first) + "!"
        whole = self._rendered([*first, {"role": "assistant", "content": "!"}, {"role": "user", "content": text}])
        if not whole.startswith(said):
            raise JobError(
                "the chat template does not append messages: what comes first changes with what follows",
                where="tokenizer",
                hint="take a template in which a conversation begins with its own beginning",
            )
        ids = self.tokenizer.encode(whole[len(said) :], add_special_tokens=False)
        return torch.tensor(ids[1:] if ended else ids)

    def text_of(self, prompt: Prompt) -> str:
        """What a prompt or history says, special tokens included."""
        return str(self.tokenizer.decode(prompt.input_ids.tolist()))

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _media(self, row: Row) -> tuple[Modality, Clip | None]:
        if row.video is not None:
            return "video", self._decode_video(row.video, self.spec.frames)
        if row.image is not None:
            return "image", self._decode_image(row.image)
        return "text", None

    def _assemble(
        self, row: Row, modality: Modality, pixels: Tensor | None, grid: Tensor | None, seconds: float
    ) -> Prompt:
        vision_tokens = 0 if grid is None else int(grid.prod()) // self.spec.merge_size**2
        text = self.text(row.question, modality, vision_tokens)
        ids = torch.tensor(self.tokenizer.encode(text, add_special_tokens=False))
        positions, next_position = self._positions(ids, modality, grid, seconds)
        return Prompt(
            row.id, row.question, row.answer, ids, positions, next_position, modality, pixels, grid, seconds,
            row.response_lengths,
        )  # fmt: skip

    def _positions(self, ids: Tensor, modality: Modality, grid: Tensor | None, seconds: float) -> tuple[Tensor, int]:
        if grid is None:
            return torch.arange(len(ids)).expand(3, -1), len(ids)
        kinds = (ids == self.model.config.image_token_id) * 1 + (ids == self.model.config.video_token_id) * 2
        positions, delta = self.model.model.get_rope_index(
            ids[None], kinds[None], **{f"{modality}_grid_thw": grid}, second_per_grid_ts=torch.tensor([seconds])
        )
        return positions[:, 0], len(ids) + int(delta)

    def _check_vocabulary(self, config: Mapping[str, Any]) -> None:
        """Model and tokenizer must mean the same by a pad token, and no id may lie outside the embedding."""
        problems = [
            Problem(f"the config says {kind}_token_id {theirs}, the tokenizer's {pad} is {ours}")
            for kind, pad in PADS.items()
            if (ours := self.tokenizer.convert_tokens_to_ids(pad)) != (theirs := config.get(f"{kind}_token_id"))
        ]
        if problems:
            raise JobError(*problems, Problem("take config.json and tokenizer.json from the same model"))
        rows = self.model.config.text_config.vocab_size
        if len(self.tokenizer) > rows:
            raise JobError(f"the tokenizer has {len(self.tokenizer)} tokens, the model's embedding {rows} rows")
