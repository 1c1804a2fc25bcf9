"""Pixels reach the tower exactly as transformers' own processors would bring them."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as theirs

from rollplex.backends.data.video import (
    Clip,
    VisionSpec,
    decode_image,
    decode_video,
    patchify,
    smart_resize,
    to_patches,
)
from rollplex.ir.errors import DataError

SPEC = VisionSpec(frames=4, min_pixels=56 * 56, max_pixels=112 * 112)


def write_video(path: Path, frames: np.ndarray, rate: int = 8) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def ramp(count: int, height: int = 48, width: int = 64) -> np.ndarray:
    """Frame i is uniformly grey 16 * i."""
    return np.stack([np.full((height, width, 3), 16 * i, dtype=np.uint8) for i in range(count)])


@pytest.mark.parametrize("size", [(100, 140), (56, 84), (300, 90), (29, 31)])
def test_an_image_gives_the_patches_of_transformers(size: tuple[int, int]) -> None:
    """Resize, normalise, order of patches and channels: equal to Qwen2VLImageProcessor's."""
    image = np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil(min_pixels=SPEC.min_pixels, max_pixels=SPEC.max_pixels)
    wanted = processor(images=[image], return_tensors="pt")
    rows, grid = to_patches(Clip(image[None], 0.0), SPEC)
    assert torch.equal(grid, wanted["image_grid_thw"])
    torch.testing.assert_close(rows, wanted["pixel_values"], rtol=0, atol=2e-6)


def test_video_patches_by_their_definition() -> None:
    """Row (t, H, W, mh, mw) holds [channel, frame 2t + dt, y, x] of patch (2H + mh, 2W + mw); odd counts padded."""
    spec = VisionSpec(patch_size=2)
    frames = torch.arange(3 * 3 * 8 * 12).float().view(3, 3, 8, 12)
    rows, grid = patchify(frames, spec)
    assert grid.tolist() == [[2, 4, 6]]
    padded = torch.cat([frames, frames[-1:]])
    wanted = [
        padded[2 * t : 2 * t + 2, :, y : y + 2, x : x + 2].transpose(0, 1).flatten()
        for t in range(2)
        for block_y in range(0, 8, 4)
        for block_x in range(0, 12, 4)
        for y in (block_y, block_y + 2)
        for x in (block_x, block_x + 2)
    ]
    assert torch.equal(rows, torch.stack(wanted))


def test_sizes_are_those_of_transformers() -> None:
    """Every shape within and beyond the pixel limits."""
    for height in range(20, 400, 37):
        for width in range(20, 400, 41):
            wanted = theirs(height, width, 28, SPEC.min_pixels, SPEC.max_pixels)
            assert smart_resize(height, width, SPEC) == wanted


def test_a_sliver_is_refused() -> None:
    """Qwen2-VL's limit on the aspect ratio."""
    with pytest.raises(DataError, match="4020 x 20 pixels: one side is more than 200 times the other"):
        smart_resize(20, 4020, SPEC)


@pytest.mark.parametrize(
    ("total", "wanted"), [(12, [0, 3, 6, 9]), (10, [0, 2, 5, 7]), (4, [0, 1, 2, 3]), (3, [0, 1, 2])]
)
def test_frames_are_sampled_evenly(total: int, wanted: list[int], tmp_path: Path) -> None:
    """i * total // count, as transformers samples; a short video gives what it has."""
    clip = decode_video(write_video(tmp_path / "a.mp4", ramp(total)), 4)
    assert [round(float(f.mean()) / 16) for f in clip.frames] == wanted
    assert clip.seconds == pytest.approx(total / 8)


def test_an_unreadable_video_is_named_with_the_reason(tmp_path: Path) -> None:
    """PyAV's own words."""
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"these bytes are not a video")
    with pytest.raises(DataError, match=r"bad\.mp4: the video cannot be read: Invalid data found"):
        decode_video(bad, 4)
    with pytest.raises(DataError, match=r"gone\.mp4: the video cannot be read: No such file"):
        decode_video(tmp_path / "gone.mp4", 4)


def test_a_truncated_video_is_named(tmp_path: Path) -> None:
    """Half a file has no index and cannot be opened."""
    path = write_video(tmp_path / "half.mp4", ramp(12))
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(DataError, match=r"half\.mp4: the video cannot be read"):
        decode_video(path, 4)


def test_a_sound_file_has_no_frames(tmp_path: Path) -> None:
    """A container without a video stream."""
    path = tmp_path / "sound.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), dtype=np.int16), layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(DataError, match=r"sound\.wav: the file has no video stream"):
        decode_video(path, 4)


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    """Pillow's own words."""
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"bad\.png: the image cannot be read: cannot identify"):
        decode_image(bad)
