"""Where the attached prefix keeps what its backward needs: working memory, a pool of the caller's, or nowhere.

policy   recompute   kept between forward and backward
hbm      none        every saved tensor, in `pool` where one is given, else where autograd put it
host     none        every saved tensor, copied into `pool` (a slot of the pinned pool), copied back in the backward
host     full        only layer inputs (non-reentrant checkpoint), copied into `pool`
dropped  any         nothing: the prefix is run again, with gradients, when its backward comes

Weights, frozen inputs and tensors already packed are not packed again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from rollplex.backends.training.sizes import ALIGN
from rollplex.ir.errors import OutOfMemory


@dataclass(frozen=True)
class SavedPolicy:
    """How saved state is kept; `pool` is a flat uint8 tensor of the caller's, one slot for one prompt."""

    where: Literal["hbm", "host", "dropped"] = "hbm"
    recompute: Literal["none", "full"] = "none"
    pool: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.where != "host" or self.pool is not None, "host needs a slot of the pinned pool"
        pool = self.pool
        assert pool is None or (pool.dtype == torch.uint8 and pool.dim() == 1 and pool.numel() % ALIGN == 0)


@dataclass(frozen=True)
class Packed:
    """A saved tensor as a view of the pool, for use on `device`; `start` is its byte offset there."""

    device: torch.device
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    start: int


@dataclass
class SavedState:
    """The hooks of one prefix, and what they keep; alive until its backward is done.

    `nbytes` counts each storage once, weights and borrowed inputs not at all: the measured size of the saved state.
    """

    policy: SavedPolicy
    borrowed: AddressRanges
    name: str
    nbytes: int = 0
    _starts: dict[tuple[StorageWeakRef, int], int] = field(default_factory=dict)

    def hooks(self) -> AbstractContextManager[object]:
        """Active around the forward; the unpack side works for as long as this object lives."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Packed | Tensor:
        if x.data_ptr() in self.borrowed:
            return x
        storage = x.untyped_storage()
        key = (StorageWeakRef(storage), x._version)
        start = self._starts.get(key)
        if start is None:
            start = self._starts[key] = self._store(storage)
        if self.policy.pool is None:
            return x
        return Packed(x.device, x.dtype, x.size(), x.stride(), start + int(x.storage_offset()) * x.element_size())

    def _store(self, storage: torch.UntypedStorage) -> int:
        start, self.nbytes = self.nbytes, self.nbytes + -(-storage.nbytes() // ALIGN) * ALIGN
        pool = self.policy.pool
        if pool is None:
            return start
        if self.nbytes > pool.numel():
            raise OutOfMemory(
                f"the saved state of this prefix needs more than {self.nbytes:,} bytes, its slot has {pool.numel():,}",
                where=self.name,
                hint="lower the prompt or frame budget, or set recompute: full",
            )
        source = torch.empty(0, dtype=torch.uint8, device=storage.device)
        source.set_(storage, 0, torch.Size((storage.nbytes(),)), (1,))
        pool[start : start + storage.nbytes()].copy_(source, non_blocking=True)
        return start

    def _unpack(self, packed: Packed | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        pool = self.policy.pool
        assert pool is not None
        whole = pool.view(packed.dtype)
        view = whole.as_strided(
            packed.size, packed.stride, whole.storage_offset() + packed.start // packed.dtype.itemsize
        )
        if view.device != packed.device:
            return view.to(packed.device, non_blocking=True)
        return view if self.policy.where == "hbm" else view.clone()


class AddressRanges:
    """Memory that belongs to the caller; `address in ranges` is how a weight is told from an activation.

    Addresses are compared, not storages or types: autograd saves `w.t()` as often as `w`, and an arena may be one
    storage that holds more than weights.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors)
        self._starts = [start for start, _ in spans]
        self._stops = [stop for _, stop in spans]

    def __contains__(self, address: int) -> bool:
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._stops[at]
