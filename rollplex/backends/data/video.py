"""Videos and images as Qwen2.5-VL reads them: frames sampled evenly, resized to whole patches, cut into patches.

decode      PyAV, frames i * total // count          (no more frames than the file has)
resize      sides to multiples of 28 (patch 14 x merge 2), min_pixels <= height * width <= max_pixels, bicubic
patches     [t, 2, channel, h, 2, 14, w, 2, 14] -> one row for each 2 x 14 x 14 block, merge neighbours adjacent
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.error import FFmpegError
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from rollplex.ir.errors import DataError

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
AV_HINT = "play it with ffplay or encode it again; ffprobe says more"


@dataclass(frozen=True)
class VisionSpec:
    """How pixels become patches. `frames` is the most frames of a video; sizes in pixels, `max_pixels` a frame."""

    frames: int = 8
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 768
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD

    @classmethod
    def from_config(cls, config: Mapping[str, Any], frames: int, min_pixels: int, max_pixels: int) -> VisionSpec:
        """Patch sizes of a config.json with a job's frames and pixels."""
        vision = config["vision_config"]
        sizes = (
            vision.get("patch_size", 14),
            vision.get("temporal_patch_size", 2),
            vision.get("spatial_merge_size", 2),
        )
        return cls(frames, min_pixels, max_pixels, *sizes)


@dataclass(frozen=True)
class Clip:
    """Decoded frames [count, height, width, 3] uint8, and how many seconds of the file they stand for."""

    frames: np.ndarray
    seconds: float


def decode_video(path: Path, frames: int) -> Clip:
    """At most `frames` frames, evenly spaced from the first on; DataError with PyAV's reason when it cannot be read."""
    try:
        with av.open(str(path)) as container:
            total = _count_frames(container, path)
        count = min(frames, total)
        with av.open(str(path)) as container:
            picked, rate = _pick(container, [i * total // count for i in range(count)])
    except (FFmpegError, IndexError, OSError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        raise DataError(f"the video cannot be read: {reason}", where=path, hint=AV_HINT) from None
    return Clip(np.stack(picked), float(total / rate))


def decode_image(path: Path) -> Clip:
    """An image as a clip of one frame; DataError when Pillow cannot read it."""
    try:
        with Image.open(path) as image:
            return Clip(np.asarray(image.convert("RGB"))[None], 0.0)
    except (OSError, UnidentifiedImageError, ValueError) as err:
        raise DataError(f"the image cannot be read: {err}", where=path) from None


def to_patches(clip: Clip, spec: VisionSpec) -> tuple[Tensor, Tensor]:
    """Patches [grid_t * grid_h * grid_w, 3 * 2 * 14 * 14] float32 and the grid [1, 3] int64, in patches."""
    height, width = smart_resize(clip.frames.shape[1], clip.frames.shape[2], spec)
    resized = [np.asarray(Image.fromarray(f).resize((width, height), Image.Resampling.BICUBIC)) for f in clip.frames]
    pixels = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).float() * (1 / 255)
    pixels = (pixels - torch.tensor(spec.mean)[:, None, None]) / torch.tensor(spec.std)[:, None, None]
    return patchify(pixels, spec)


def patchify(frames: Tensor, spec: VisionSpec) -> tuple[Tensor, Tensor]:
    """Frames [count, 3, height, width] to rows in the tower's order; an odd count repeats its last frame."""
    missing = -frames.shape[0] % spec.temporal_patch_size
    frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
    t, channels, height, width = frames.shape
    p, m = spec.patch_size, spec.merge_size
    grid = (t // spec.temporal_patch_size, height // p, width // p)
    blocks = frames.view(grid[0], -1, channels, grid[1] // m, m, p, grid[2] // m, m, p)
    rows = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(math.prod(grid), -1)
    return rows.contiguous(), torch.tensor([grid])


def smart_resize(height: int, width: int, spec: VisionSpec) -> tuple[int, int]:
    """Height and width in whole merged patches, between min and max pixels, near the old aspect ratio."""
    factor = spec.patch_size * spec.merge_size
    if max(height, width) > 200 * min(height, width):
        raise DataError(f"{width} x {height} pixels: one side is more than 200 times the other", hint="crop it")
    new = round(height / factor) * factor, round(width / factor) * factor
    if new[0] * new[1] > spec.max_pixels:
        scale = math.sqrt(height * width / spec.max_pixels)
        return _whole(height / scale, factor), _whole(width / scale, factor)
    if new[0] * new[1] < spec.min_pixels:
        scale = math.sqrt(spec.min_pixels / (height * width))
        return math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    return new


def _whole(side: float, factor: int) -> int:
    return max(factor, math.floor(side / factor) * factor)


def _count_frames(container: Any, path: Path) -> int:
    """Packets that hold data: headers often lie about the number of frames, and counting decodes nothing."""
    if not container.streams.video:
        raise DataError("the file has no video stream", where=path, hint=AV_HINT)
    total = sum(1 for packet in container.demux(container.streams.video[0]) if packet.size)
    if not total:
        raise DataError("the video has no frames", where=path, hint=AV_HINT)
    return total


def _pick(container: Any, wanted: list[int]) -> tuple[list[np.ndarray], Fraction]:
    """The wanted frames in order; a file that ends early repeats its last frame."""
    picked: list[np.ndarray] = []
    last = None
    for index, frame in enumerate(container.decode(video=0)):
        if index in wanted:
            last = frame.to_ndarray(format="rgb24")
            picked.append(last)
        if len(picked) == len(wanted):
            break
    if last is None:
        raise IndexError("no frame could be decoded")
    picked += [last] * (len(wanted) - len(picked))
    return picked, Fraction(container.streams.video[0].average_rate or 25)
