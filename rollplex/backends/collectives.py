"""Groups of ranks that meet in collectives, all of them processes of one machine.

tp   ranks of one copy of the model, or of one rollout engine          parts of every tensor
dp   the same part in every copy that is trained                       gradients are reduced, shares sent around

pair the training and the rollout process of one GPU                   new weights go into the rollout engine's own copy

Training ranks whose slabs make up one rollout shard write them into each other's pages (training/peers.py): all of them
are in one group tp, and meet there before and behind that.

tensors of a host                                gloo
tensors of a GPU, each rank on a GPU of its own  NCCL: queued like a kernel, and the stream of the caller waits for it
tensors of a GPU that two of the ranks share     gloo through host memory: NCCL refuses two ranks on one device

A process of whose kind no two ranks send to each other joins nothing, and NCCL has a communicator among all only where
one of the groups is all: each takes memory. Every wait ends when the last rank of the group has come, and gives up
after the job's run.silent_s: gloo with an error here, NCCL's watchdog by ending the process, with the collective in its
log. A rank that dies ends gloo's waits at once; those of NCCL end with the run, which the controller who sees it ends.
"""

from __future__ import annotations

import os
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
from rollplex.ir.placement import Seat, cuda_device, seat

LATE = "look at the logs of the other ranks: one has ended, or is slower than run.silent_s allows"


def groups_of(job: Job, kind: str, ranks: int) -> dict[str, list[list[int]]]:
    """The groups of a process kind by name: lists of its ranks, each rank in at most one of a name."""
    seats = [seat(job, kind, rank) for rank in range(ranks)]
    found = {"tp": _grouped(seats, lambda s: (s.copy,))}
    if kind == "train":
        found["dp"] = _grouped(seats, lambda s: (s.tp,))
    return {name: [group for group in groups if len(group) > 1] for name, groups in found.items()}


def store_in(place: Path, ranks: int) -> dist.FileStore:  # pyright: ignore[reportPrivateImportUsage]
    """Where ranks find each other: a file that each keeps open, since the directory goes when all have started.

    NCCL looks into it later too: its watchdog, for what other ranks have to say.
    """
    fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return dist.FileStore(f"/proc/self/fd/{fd}", ranks)  # pyright: ignore[reportPrivateImportUsage]


def own_gpus(job: Job, ranks: int) -> bool:
    """Whether each rank of a process kind has a GPU of its own, so that NCCL takes them."""
    return not job.on_host and len({cuda_device(job, rank) for rank in range(ranks)}) == ranks


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
        named, every = groups_of(job, kind, ranks), tuple(range(ranks))
        if not any(named.values()):
            return cls()
        limit = timedelta(seconds=job.run.silent_s)
        with waiting(f"the {ranks} {kind} ranks"):
            store, backends = store_in(meeting / kind, ranks), _backends(job, rank, ranks)
            gpu = backends.get("device_id")
            if [list(every)] not in named.values():
                backends.pop("device_id", None)  # with it NCCL would connect all at once
            dist.init_process_group(store=store, rank=rank, world_size=ranks, timeout=limit, **backends)
            # One of the same ranks, whatever its name: a communicator of NCCL takes memory.
            made: dict[tuple[int, ...], Any] = {every: dist.group.WORLD}
            members, groups = {}, {}
            for name, of_name in named.items():
                for group in map(tuple, of_name):  # every rank makes every group, in the same order
                    if group not in made:
                        made[group] = dist.new_group(list(group), timeout=limit)
                    if rank in group:
                        members[name], groups[name] = group, made[group]
            found = cls(rank, members, groups)
            found._begin(gpu)
        return found

    def size(self, name: str) -> int:
        """Ranks of the group."""
        return len(self.members.get(name, (self.rank,)))

    def place(self, name: str) -> int:
        """This rank's number in the group."""
        return self.members.get(name, (self.rank,)).index(self.rank)

    def all_reduce(self, name: str, values: torch.Tensor) -> None:
        """Sum over the group, in place; every rank gets the same bits."""
        if name in self._groups:
            with waiting(f"{name} group {self.members[name]}"):
                dist.all_reduce(values, group=self._groups[name])

    def reduce(self, name: str, values: torch.Tensor, owner: int) -> None:
        """Sum over the group on its rank number `owner`, in place; what the others have afterwards is undefined."""
        if name in self._groups:
            with waiting(f"{name} group {self.members[name]}"):
                dist.reduce(values, group=self._groups[name], group_dst=owner)

    def broadcast(self, name: str, values: torch.Tensor, owner: int) -> None:
        """The values of the group's rank number `owner` to all, in place."""
        if name in self._groups:
            with waiting(f"{name} group {self.members[name]}"):
                dist.broadcast(values, group=self._groups[name], group_src=owner)

    def all_gather(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """The last dim of all ranks' values, one behind the other in the order of the group."""
        if name not in self._groups:
            return values
        parts = [torch.empty_like(values) for _ in self.members[name]]
        with waiting(f"{name} group {self.members[name]}"):
            dist.all_gather(parts, values.contiguous(), group=self._groups[name])
        return torch.cat(parts, dim=-1)

    def meet(self, name: str) -> None:
        """Returns when all ranks of the group have come: what each did before on its host is done."""
        self.all_reduce(name, torch.zeros(1))

    def handle(self, name: str) -> dist.ProcessGroup | None:
        """The group as torch has it, for an engine that sends by itself; None for a rank alone."""
        return self._groups.get(name)

    def close(self) -> None:
        """Leave all groups; with NCCL the ranks of a kind do so together."""
        if self._groups or dist.is_initialized():
            dist.destroy_process_group()

    def _begin(self, gpu: torch.device | None) -> None:
        """NCCL takes its buffers at the first call of each kind: now, while the plan's context has room for them."""
        for name in self._groups if gpu else ():
            slabs = torch.zeros(self.size(name), 1, device=gpu)
            self.all_reduce(name, slabs)
            self.reduce(name, slabs, 0)
            self.broadcast(name, slabs, 0)
            self.all_gather(name, slabs)


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
        with waiting(self._name):
            self._group = dist.ProcessGroupGloo(place, 0 if self.sends else 1, 2, timedelta(seconds=limit_s))

    def copy(self, values: torch.Tensor) -> None:
        """The sender's values into the receiver's, contiguous and as many; returns when they are there."""
        assert self._group is not None, "a pair joins before it copies"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with waiting(self._name):
            self._group.broadcast([values], options).wait()

    @property
    def _name(self) -> str:
        return f"the training and the rollout process of GPU {self.gpu}"


def _backends(job: Job, rank: int, ranks: int) -> dict[str, Any]:
    """What carries the tensors of a rank: with its device NCCL starts at once, and not in the middle of a step."""
    if not own_gpus(job, ranks):
        return {"backend": "gloo"}
    device = torch.device("cuda", cuda_device(job, rank))
    torch.cuda.set_device(device)
    return {"backend": "cpu:gloo,cuda:nccl", "device_id": device}


@contextmanager
def waiting(what: str, hint: str = LATE) -> Iterator[None]:
    """PeerError where a rank is lost or late, which torch reports as a RuntimeError."""
    try:
        yield
    except RuntimeError as err:
        raise PeerError(f"a collective failed: {str(err).splitlines()[0]}", where=what, hint=hint) from None
