"""Bytes of working memory that a stretch of torch code holds at its peak: what a workspace is measured by.

with LiveBytes() as live: ..                     live.peak_bytes

Counts every storage that an operator inside the block allocates, from there to its death, in the backward too.
Memory of the caller (weights, arenas, pools) is not counted, nor what a kernel allocates and frees within one call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Tracks storages by the operators that make them; slows small operators down, so it is not for every step."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [storage for storage in _storages((out,)) if storage._cdata not in self._known]
        if made:  # or of the caller, who gave it
            given = {storage._cdata for storage in _storages((*args, *(kwargs or {}).values()))}
            for storage in made:
                if storage._cdata not in given:
                    self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= nbytes


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Of tensors and lists of tensors, which is all that operators take and return; `tree_leaves` takes as long as
    a small operator."""
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x.untyped_storage()
        elif isinstance(x, (list, tuple)):
            yield from _storages(x)
