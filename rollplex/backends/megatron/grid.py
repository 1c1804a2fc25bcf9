"""Where the patches of a video lie: the windows they attend in, and their coordinates.

Patches come in blocks of merge x merge, block after block, frame after frame; windows are `window` pixels wide and cut
off at the right and at the bottom. Bai et al. 2025, arXiv 2502.13923, section 2.1.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """`frames` x `height` x `width` patches, merged `merge` x `merge`; a window is `window` merged patches wide."""

    frames: int
    height: int
    width: int
    merge: int
    window: int

    def coordinates(self) -> Tensor:
        """Row and column of every patch [2, patches], in their order."""
        shape = (self.height // self.merge, self.width // self.merge, self.merge, self.merge)
        rows = torch.arange(self.height).view(shape[0], 1, self.merge, 1).expand(shape)
        columns = torch.arange(self.width).view(1, shape[1], 1, self.merge).expand(shape)
        return torch.stack([rows.flatten(), columns.flatten()]).repeat(1, self.frames)

    def windows(self) -> tuple[Tensor, Tensor]:
        """Merged patches [blocks] window by window, and the windows' bounds in patches [windows + 1]."""
        down, across = self.height // self.merge, self.width // self.merge
        per_row = -(-across // self.window)
        per_frame = -(-down // self.window) * per_row
        row = torch.arange(down)[:, None] // self.window * per_row
        number = (row + torch.arange(across)[None] // self.window).flatten()
        number = (number + torch.arange(self.frames)[:, None] * per_frame).flatten()
        sizes = torch.unique(number, return_counts=True)[1] * self.merge**2
        return torch.argsort(number, stable=True), _bounds(sizes)

    def whole_frames(self) -> Tensor:
        """Bounds of the frames in patches [frames + 1]."""
        return _bounds(torch.full((self.frames,), self.height * self.width))


def _bounds(sizes: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
