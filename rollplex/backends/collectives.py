"""Groups of ranks that meet in collectives: gloo between the processes of one machine.

tp   ranks of one copy of the model, or of one rollout engine          parts of every tensor
dp   the same part in every copy                                       gradients are reduced, shares sent around
q    training ranks whose slabs make up one rollout shard              slabs are gathered, in place

pair the training and the rollout process of one GPU                   new weights go into the rollout engine's own copy

A process whose kind has one rank joins nothing. Every wait ends when the last rank of the group has come, and gives up
after the job's run.silent_s; a rank that dies ends it for the others at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollplex.ir.errors import PeerError
from rollplex.ir.job import Job
from rollplex.ir.placement import Seat, seat


def groups_of(job: Job, kind: str, ranks: int) -> dict[str, list[list[int]]]:
    """The groups of a process kind by name: lists of its ranks, each rank in at most one of a name."""
    seats = [seat(job, kind, rank) for rank in range(ranks)]
    found = {"tp": _grouped(seats, lambda s: (s.copy,)), "dp": _grouped(seats, lambda s: (s.tp,))}
    if kind == "train" and job.q:
        found["q"] = _grouped(seats, lambda s: (s.copy, s.tp // job.q))
    return {name: [group for group in groups if len(group) > 1] for name, groups in found.items()}


def _grouped(seats: Sequence[Seat], key: Callable[[Seat], tuple[int, ...]]) -> list[list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for s in seats:
        found.setdefault(key(s), []).append(s.gpu)
    return list(found.values())


@dataclass(frozen=True)
class Groups:
    """The groups of one rank. A name that it is in no group of is a group of itself."""

    rank: int = 0
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    _groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def join(cls, job: Job, kind: str, rank: int, ranks: int, meeting: Path) -> Groups:
        """Meet the other ranks of the kind in the directory `meeting`; all of them must call this."""
        if ranks == 1:
            return cls()
        limit = timedelta(seconds=job.run.silent_s)
        with _waiting(f"the {ranks} {kind} ranks"):
            place = f"file://{(meeting / kind).absolute()}"
            dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks, timeout=limit)
            members, groups = {}, {}
            for name, of_name in groups_of(job, kind, ranks).items():
                for group in of_name:  # every rank makes every group, in the same order
                    made = dist.new_group(group, timeout=limit)
                    if rank in group:
                        members[name], groups[name] = tuple(group), made
        return cls(rank, members, groups)

    def size(self, name: str) -> int:
        """Ranks of the group."""
        return len(self.members.get(name, (self.rank,)))

    def place(self, name: str) -> int:
        """This rank's number in the group."""
        return self.members.get(name, (self.rank,)).index(self.rank)

    def all_reduce(self, name: str, values: torch.Tensor) -> None:
        """Sum over the group, in place; every rank gets the same bits."""
        if name in self._groups:
            with _waiting(f"{name} group {self.members[name]}"):
                dist.all_reduce(values, group=self._groups[name])

    def reduce(self, name: str, values: torch.Tensor, owner: int) -> None:
        """Sum over the group on its rank number `owner`, in place; what the others have afterwards is undefined."""
        if name in self._groups:
            with _waiting(f"{name} group {self.members[name]}"):
                dist.reduce(values, group=self._groups[name], group_dst=owner)

    def broadcast(self, name: str, values: torch.Tensor, owner: int) -> None:
        """The values of the group's rank number `owner` to all, in place."""
        if name in self._groups:
            with _waiting(f"{name} group {self.members[name]}"):
                dist.broadcast(values, group=self._groups[name], group_src=owner)

    def all_gather(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """The last dim of all ranks' values, one behind the other in the order of the group."""
        if name not in self._groups:
            return values
        parts = [torch.empty_like(values) for _ in self.members[name]]
        with _waiting(f"{name} group {self.members[name]}"):
            dist.all_gather(parts, values.contiguous(), group=self._groups[name])
        return torch.cat(parts, dim=-1)

    def fill(self, name: str, slabs: torch.Tensor) -> None:
        """[ranks, elements]: row i is rank i's of the group and is sent to the others, in place; nothing is copied."""
        if name in self._groups:
            with _waiting(f"{name} group {self.members[name]}"):
                dist.all_gather(list(slabs), slabs[self.place(name)], group=self._groups[name])

    def handle(self, name: str) -> dist.ProcessGroup | None:
        """The group as torch has it, for an engine that sends by itself; None for a rank alone."""
        return self._groups.get(name)

    def close(self) -> None:
        """Leave all groups."""
        if self._groups or dist.is_initialized():
            dist.destroy_process_group()


@dataclass
class Pair:
    """One side of a pair: `sends` says whether it is the training process. Both sides `join` once, before any copy."""

    meeting: Path
    gpu: int
    sends: bool
    _group: Any = None  # a ProcessGroupGloo, of which torch's stubs know half

    def join(self, limit_s: float) -> None:
        """Meet the other side in the directory `meeting`; this and each copy give up after `limit_s`."""
        place = dist.FileStore(str(self.meeting / f"pair-{self.gpu}"), 2)  # pyright: ignore[reportPrivateImportUsage]
        with _waiting(self._name):
            self._group = dist.ProcessGroupGloo(place, 0 if self.sends else 1, 2, timedelta(seconds=limit_s))

    def copy(self, values: torch.Tensor) -> None:
        """The sender's values into the receiver's, contiguous and as many; returns when they are there."""
        assert self._group is not None, "a pair joins before it copies"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with _waiting(self._name):
            self._group.broadcast([values], options).wait()

    @property
    def _name(self) -> str:
        return f"the training and the rollout process of GPU {self.gpu}"


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """gloo reports a lost or late rank as a RuntimeError."""
    try:
        yield
    except RuntimeError as err:
        hint = "look at the logs of the other ranks: one has ended, or is slower than run.silent_s allows"
        raise PeerError(f"a collective failed: {str(err).splitlines()[0]}", where=what, hint=hint) from None
