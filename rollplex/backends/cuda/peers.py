"""What the ranks of a calibration's side are to each other: whose hidden states are summed, and who turns when.

                 in front of qkv, gate, up    behind o, down                        as in
Alone            [t, h]                       [t, h]                                one rank
Peers            [t, h]                       all-reduce, [t, h]                    vLLM; Megatron
Peers, stretches all-gather of [t / tp, h]    reduce-scatter of [t, h], [t / tp, h] Megatron's sequence parallelism

rank 0   | turn 7 | turn 8 | mark, turn 9 |      a question is answered behind a turn that began when all had heard it
rank 1   | turn 7 | turn 8 | mark, turn 9 |      so that none waits in a collective for a rank that has ended its work

Every wait ends when the last rank has come, and gives up after PATIENCE_S: gloo with an error here, NCCL's watchdog by
ending the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rollplex.backends.collectives import store_in, waiting
from rollplex.backends.cuda.post import Post

PATIENCE_S = 60.0
"""Less than who asks waits for an answer: a rank that waits for another says so itself."""
_together = partial(waiting, "calibrate", "another rank has ended")


class Ranks(Protocol):
    """What ranks that cut one model do between its linears. A rank keeps one of `pieces` of a sequence's tokens."""

    @property
    def pieces(self) -> int:
        """Stretches of a sequence."""
        ...

    def gathered(self, own: Tensor) -> Tensor:
        """All tokens [t, h] from those of this rank [t / pieces, h]."""
        ...

    def summed(self, part: Tensor) -> Tensor:
        """This rank's tokens [t / pieces, h] of the sum over ranks of [t, h], which may be overwritten."""
        ...

    def agreed(self, heard: int, turn: Callable[[], None]) -> int:
        """Questions that may be answered now, of those `heard`: the same number on every rank; `turn` meanwhile."""
        ...

    def close(self) -> None:
        """Leave the others, all at the same time."""
        ...


class Alone:
    """One rank: nothing is exchanged, and a question is answered before the next turn."""

    pieces = 1

    def gathered(self, own: Tensor) -> Tensor:
        return own

    def summed(self, part: Tensor) -> Tensor:
        return part

    def agreed(self, heard: int, turn: Callable[[], None]) -> int:
        if not heard:
            turn()
        return heard

    def close(self) -> None:
        """There are none."""


@dataclass(frozen=True)
class Peers:
    """The ranks of torch's default group."""

    ranks: int
    pieces: int

    @classmethod
    def join(cls, post: Post, device: torch.device) -> Peers:
        """Meet the others; all of them must call this. PeerError where one does not come."""
        backends: dict[str, Any] = {"backend": "gloo"}
        if device.type == "cuda":  # with its device NCCL connects now, and not within the first figure
            backends = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
        limit = timedelta(seconds=PATIENCE_S)
        with _together():
            store = store_in(Path(post.meeting), post.tp)
            dist.init_process_group(store=store, rank=post.rank, world_size=post.tp, timeout=limit, **backends)
        return cls(post.tp, post.tp if post.stretches else 1)

    def gathered(self, own: Tensor) -> Tensor:
        if self.pieces == 1:
            return own
        every = own.new_empty(self.ranks * len(own), *own.shape[1:])
        with _together():
            dist.all_gather_into_tensor(every, own)
        return every

    def summed(self, part: Tensor) -> Tensor:
        with _together():
            if self.pieces == 1:
                dist.all_reduce(part)
                return part
            own = part.new_empty(len(part) // self.ranks, *part.shape[1:])
            dist.reduce_scatter_tensor(own, part)
        return own

    def agreed(self, heard: int, turn: Callable[[], None]) -> int:
        """The fewest that any rank has heard. Ranks compare over the host, while the GPU is at work."""
        least = torch.tensor([heard])
        with _together():
            comparing = dist.all_reduce(least, op=dist.ReduceOp.MIN, async_op=True)
        turn()
        with _together():
            assert comparing is not None, "this rank is one of the group"
            comparing.wait()
        return int(least)

    def close(self) -> None:
        dist.destroy_process_group()
