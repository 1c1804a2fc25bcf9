"""Peers: the ranks whose slabs make up a rollout shard. Each maps the others' snapshots, and writes its slabs there.

rank 0   its snapshot  |s0 s1|..    peer 1's, imported  |s0 s1|..       s0 is copied from the one into the other
rank 1   its snapshot  |s0 s1|..    peer 0's, imported  |s0 s1|..       s1

The pages stay their owner's: they are counted there alone, and its ledger refuses to let them go before its peers have.
Behind the first comes the page of the owner's stamp: weights that are whole, which its rollout engine may read, are not
written.
Paper section 3.3, binding and refresh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollplex.backends.base import Arena
from rollplex.backends.memory.ledger import Ledger
from rollplex.backends.memory.planned import PlannedObjects
from rollplex.backends.publication import StampPage
from rollplex.ir.errors import EngineError


@dataclass
class Peer:
    """One peer's pages of the object `name`; `ledger` is that of its device."""

    name: str
    owner: str
    arena: Arena
    ledger: Ledger
    stamp: StampPage | None = None

    def adopt(self, fds: Sequence[int], step: str) -> None:
        """Map them, writable; the descriptors are taken over."""
        if self.stamp is None:
            *fds, stamp = fds
            self.stamp = StampPage(stamp, writable=False)
        self.ledger.borrow(self.name, self.owner, step)
        self.arena.adopt(fds, writable=True)

    def let_go(self, step: str) -> None:
        """Unmap them; PlanError if they are not mapped."""
        self.arena.unmap()
        self.ledger.give_back(self.name, self.owner, step)

    def pages(self, dtype: torch.dtype) -> Tensor:
        """All of them, to be written; EngineError while they hold weights that are whole."""
        assert self.stamp is not None, "a peer's pages are adopted before they are written"
        if not (stamp := self.stamp.read()).written:
            what = f"the pages of {self.owner} hold {stamp}, which its rollout engine may read: none of it is written"
            hint = "end the run and start again: a rank writes weights out of turn"
            raise EngineError(what, where=f"exchange of {self.name}", hint=hint)
        return self.arena.view(0, (self.arena.nbytes // dtype.itemsize,), dtype)

    def close(self) -> None:
        """For the end of a process, in any state: the owner may have gone."""
        self.arena.close()
        self.ledger.forget(self.ledger.process)
        if self.stamp is not None:
            self.stamp.close()


@dataclass(frozen=True)
class Peers:
    """A rank's peers by their ranks, in the order in which it writes to them; none where nothing is exchanged."""

    name: str
    by_rank: dict[int, Peer]

    @classmethod
    def of(cls, objects: PlannedObjects, name: str, ranks: Sequence[int], ledgers: Sequence[int]) -> Peers:
        """Addresses for the pages of these training ranks; `ledgers` are descriptors of theirs, and taken over."""
        process = objects.ledger.process
        found = {
            rank: Peer(name, owner, objects.range_like(name, owner), Ledger.attach(fd, process=process))
            for rank, owner, fd in zip(ranks, (f"train {rank}" for rank in ranks), ledgers, strict=True)
        }
        return cls(name, found)

    def pages(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Each peer's, flat."""
        return (peer.pages(dtype) for peer in self.by_rank.values())

    def inodes(self) -> dict[int, list[int]]:
        """Of each peer's pages, by its rank: equal to the owner's."""
        return {rank: peer.arena.inodes() for rank, peer in self.by_rank.items()}

    def let_go(self, step: str) -> None:
        """The pages of all."""
        for peer in self.by_rank.values():
            peer.let_go(step)

    def close(self) -> None:
        """Let everything go."""
        for peer in self.by_rank.values():
            peer.close()
