"""Bytes of working memory that a stretch of torch code holds at its peak: what a workspace is measured by.

with LiveBytes() as live: ..                     live.peak_bytes

Counts every storage that an operator inside the block allocates, from there to its death, in the backward too.
Memory of the caller (weights, arenas, pools) is not counted, nor what a kernel allocates and frees within one call.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Tracks storages by the operators that make them; slows small operators down, so it is not for every step."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and _key(x) not in given:
                self._count(x.untyped_storage())
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


def _key(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata
