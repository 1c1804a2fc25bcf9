"""A row becomes the prompt that Qwen2.5-VL was trained on: template, pad tokens, patches, positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from host_tiny import CONFIG
from PIL import Image
from test_video import ramp, write_video

from rollplex.backends.data.encode import PromptMaker
from rollplex.backends.data.rows import Row
from rollplex.backends.data.tokens import byte_tokenizer, end_tokens, load_tokenizer, response_text
from rollplex.backends.data.video import VisionSpec
from rollplex.ir.errors import DataError, JobError

BYTES = {
    **CONFIG,
    "image_token_id": 262,
    "video_token_id": 263,
    "text_config": {**CONFIG["text_config"], "vocab_size": 320, "bos_token_id": 256, "eos_token_id": 258},
}
SPEC = VisionSpec(frames=4, min_pixels=56 * 56, max_pixels=112 * 112)


def test_a_video_row_becomes_pads_patches_and_three_positions(tmp_path: Path) -> None:
    """48 x 64 pixels -> 56 x 56, 4 frames -> grid 2 x 4 x 4 = 32 patches = 8 pad tokens; 8 frames a second, 1.5 s."""
    path = write_video(tmp_path / "a.mp4", ramp(12))
    prompt = PromptMaker(BYTES, byte_tokenizer(), SPEC)(Row("train.jsonl:1", "way?", "left", video=path))
    text = byte_tokenizer().decode(prompt.input_ids)
    pads = "<|video_pad|>" * 8
    assert text == (f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>way?<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.grid_thw is not None
    assert prompt.grid_thw.tolist() == [[2, 4, 4]]
    assert (prompt.patches, prompt.prefix_tokens) == (32, len(prompt.input_ids) - 1)
    assert prompt.seconds_per_grid == pytest.approx(12 / 8 / 4 * 2)
    at = prompt.input_ids.tolist().index(263)
    start = int(prompt.position_ids[0, at])
    step = int(0.75 * 4)  # seconds per grid x tokens_per_second
    assert (prompt.position_ids[:, at : at + 8] - start).tolist() == [
        [0, 0, 0, 0, step, step, step, step],
        [0, 0, 1, 1, 0, 0, 1, 1],
        [0, 1, 0, 1, 0, 1, 0, 1],
    ]
    assert prompt.position_ids[:, -1].tolist() == [prompt.next_position - 1] * 3


def test_an_image_and_a_text_row(tmp_path: Path) -> None:
    """One grid step for an image; no pad and plain positions for text."""
    Image.new("RGB", (56, 84)).save(tmp_path / "a.png")
    make = PromptMaker(BYTES, byte_tokenizer(), SPEC)
    image = make(Row("r", "colour?", "red", image=tmp_path / "a.png"))
    assert image.grid_thw is not None
    assert image.grid_thw.tolist() == [[1, 6, 4]]
    assert (image.input_ids == 262).sum() == 6
    text = make(Row("r", "1 + 1", "2"))
    assert text.pixel_values is None
    assert text.next_position == len(text.input_ids)
    assert torch.equal(text.position_ids[2], torch.arange(len(text.input_ids)))


def test_a_saved_tokenizer_loads_and_speaks_bytes(tmp_path: Path) -> None:
    """Every text survives; end tokens are <|endoftext|> and <|im_end|>."""
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert end_tokens(tokenizer) == (256, 258)
    ids = tokenizer.encode("héllo <answer>\n", add_special_tokens=False)
    assert max(ids) < 256
    assert response_text(tokenizer, [*ids, 258]) == "héllo <answer>\n"


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """Nothing is downloaded."""
    with pytest.raises(JobError, match="no tokenizer here"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    """A pad token that the model does not know would silently stay text."""
    with pytest.raises(JobError, match=r"image_token_id 62, the tokenizer's <\|image_pad\|> is 262"):
        PromptMaker(CONFIG, byte_tokenizer(), SPEC)
    small = {**BYTES, "text_config": {**BYTES["text_config"], "vocab_size": 260}}
    with pytest.raises(JobError, match="the tokenizer has 264 tokens, the model's embedding 260 rows"):
        PromptMaker(small, byte_tokenizer(), SPEC)


def test_media_that_cannot_be_resized_names_its_file(tmp_path: Path) -> None:
    """The row's file is in the message."""
    Image.new("RGB", (4020, 20)).save(tmp_path / "thin.png")
    with pytest.raises(DataError, match=r"thin\.png: 4020 x 20 pixels"):
        PromptMaker(BYTES, byte_tokenizer(), SPEC)(Row("r", "q", "a", image=tmp_path / "thin.png"))
