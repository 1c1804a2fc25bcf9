"""The safetensors format as it is written: a header, then the bytes of every tensor, block by block.

length of the header, 8 bytes | {"actor.master": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}, ..} | data

What lies on a GPU leaves it through one page-locked block: nothing is copied whole, and the link runs at its rate.
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

BLOCK = 16 << 20
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
Shapes = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Dtype and shape of each tensor by name, in the order of their data."""


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """Those of tensors that are there."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def header(shapes: Shapes, metadata: Mapping[str, str] | None = None) -> bytes:
    """Everything before the data."""
    rows: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in shapes.items():
        stop = at + prod(shape) * dtype.itemsize
        rows[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Blocks:
    """Takes tensors to the host a block at a time; one for each file that is being written."""

    def __init__(self) -> None:
        self._staging: Tensor | None = None

    def of(self, tensor: Tensor) -> Iterator[memoryview]:
        """The tensor's bytes in order; a block is to be used before the next is asked for."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for block in flat.split(BLOCK) if len(flat) else ():
            yield self._here(block).numpy().data

    def _here(self, block: Tensor) -> Tensor:
        if block.device.type == "cpu":
            return block
        if self._staging is None:
            self._staging = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
        return self._staging[: len(block)].copy_(block)
