"""What a process takes from one iteration to the next, and how it lies in a checkpoint: tensors, and plain JSON.

train-0.safetensors      actor.snapshot, actor.vision, actor.master, actor.moments     [elements] each, as in memory
facts                    {"steps": 12}                                                 beside it, in checkpoint.json

Files are written in one pass: bytes are hashed as they go, nothing is copied.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollplex.backends.tensorfile import NAMES, Blocks, header, shapes_of
from rollplex.ir.errors import RunError


@dataclass(frozen=True)
class Carried:
    """State that outlives an iteration: `own` is this process' alone, `copied` the same in every copy of the model.

    The tensors may be live memory; `facts` is JSON. A process that carries nothing returns an empty one.
    """

    own: Mapping[str, Tensor] = field(default_factory=dict)
    copied: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint as it was written."""

    name: str
    nbytes: int
    sha256: str

    def wrong(self, folder: Path) -> str:
        """What is wrong with the file now, "" if it is whole."""
        path = folder / self.name
        try:
            size = path.stat().st_size
            if size != self.nbytes:
                return f"{self.name} has {size} bytes, {self.nbytes} were written"
            with path.open("rb") as opened:
                found = file_digest(opened, "sha256").hexdigest()
        except OSError as err:
            return f"{self.name}: {err.strerror}"
        return "" if found == self.sha256 else f"{self.name} holds other bytes than were written"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """A safetensors file of these tensors, on disk when this returns; RunError when it cannot be written."""
    seen, nbytes = sha256(), 0
    try:
        with path.open("wb") as out:
            for block in _blocks(tensors):
                seen.update(block)
                nbytes += out.write(block)
            out.flush()
            os.fsync(out.fileno())
    except OSError as err:
        hint = "free space on this disk, then go on from the checkpoint before with --resume"
        raise RunError(f"cannot write the checkpoint: {err.strerror}", where=path, hint=hint) from None
    return FileRecord(path.name, nbytes, seen.hexdigest())


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of files that `write_tensors` made, each read when it is asked for; RunError for no such file."""

    def __init__(self, *paths: Path) -> None:
        self._places = {name: (path, *place) for path in paths for name, place in _places(path).items()}

    def __getitem__(self, name: str) -> Tensor:
        path, dtype, shape, start, nbytes = self._places[name]
        with path.open("rb") as opened:
            opened.seek(start)
            data = bytearray(nbytes)
            opened.readinto(data)
        return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _places(path: Path) -> dict[str, tuple[torch.dtype, list[int], int, int]]:
    """Dtype, shape, first byte and bytes of every tensor of a file."""
    dtypes = {name: dtype for dtype, name in NAMES.items()}
    try:
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            rows = json.loads(opened.read(length))
    except (OSError, ValueError) as err:
        raise RunError(f"cannot read the checkpoint: {err}", where=path, hint="resume from another one") from None
    return {
        name: (dtypes[row["dtype"]], row["shape"], 8 + length + start, stop - start)
        for name, row in rows.items()
        for start, stop in [row["data_offsets"]]
    }


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview | bytes]:
    """The file from its first byte to its last."""
    yield header(shapes_of(tensors))
    blocks = Blocks()
    for tensor in tensors.values():
        yield from blocks.of(tensor)
