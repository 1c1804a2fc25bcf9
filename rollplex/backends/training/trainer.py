"""The training rank: what prefix, suffix, train and prefix_backward mean, whichever engine runs the model.

prefix           prompt[:-1] through the role's model -> keys and values into its boundary slot
suffix           last prompt token and responses over the boundary, detached -> log-probabilities, values or scores
whole            each response behind a prompt of its own, detached: nothing of the call could be shared
train            the same with autograd, the loss of the group, backward into gradients and boundary leaves
prefix_backward  the boundary's gradient through language prefix, projector and vision tower
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from rollplex.backends.carried import Carried
from rollplex.backends.collectives import Groups, Pair
from rollplex.backends.device import device_of
from rollplex.backends.digest import digest
from rollplex.backends.engine import EngineReport, TrainedState, Values
from rollplex.backends.live import LiveBatch
from rollplex.backends.memory.planned import IDLE, PlannedObjects
from rollplex.backends.publication import Publication
from rollplex.backends.rolemodel import RoleModel
from rollplex.backends.training.beside import Beside
from rollplex.backends.training.carrying import CarriedObjects
from rollplex.backends.training.gradients import FlatGradients
from rollplex.backends.training.groups import GroupWork
from rollplex.backends.training.loss import Scores, StepLoss
from rollplex.backends.training.peers import Peers
from rollplex.backends.training.placement import DTYPES
from rollplex.backends.training.refresh import Copies, copies
from rollplex.backends.training.shares import DP, Shares
from rollplex.ir.decay import decays
from rollplex.ir.errors import RunError
from rollplex.ir.job import Job
from rollplex.ir.placement import Seat, peers
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange, Rebuild, Run, role_of, written_by_peers

Make = Callable[[str, PlannedObjects], RoleModel]


class TrainEngine:
    """`Engine` of a training rank: holds every trained role and every frozen one, each made by `make`."""

    def __init__(
        self,
        plan: Plan,
        job: Job,
        seat: Seat,
        groups: Groups,
        pair: Pair,
        process: str,
        fds: Sequence[int],
        make: Make,
        live: Sequence[LiveBatch],
    ) -> None:
        """`fds` are the ledgers of its device and of the host, then of its peers' devices; all are taken over."""
        self.plan = plan
        self.job = job
        self._seat, self._ranks = seat, groups
        self.role = job.policy
        self.dtype = DTYPES[job.model.dtype]
        self.state_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._objects = PlannedObjects(plan, "train", process, fds, device_of(job, seat.gpu))
        self._copies = Copies(pair, self._objects, copies(plan, self.role, "train"))
        roles = [name for name, role in job.roles.items() if role.train or role.score]
        self._replicas = {role: make(role, self._objects) for role in roles}
        self._scores = Scores(plan, seat, groups)
        self._losses = {role: StepLoss(loss, self._scores) for role, loss in plan.losses.items()}
        dtypes = (self.dtype, self.state_dtype)
        self._flat = {r: FlatGradients(self._objects.pages(f"{r}.gradients", self.state_dtype)) for r in job.trained}
        models = (self._replicas, self._flat)
        self._work = GroupWork(plan, job, *dtypes, seat, *models, self._objects, self._scores, self._losses)
        self._carried = CarriedObjects(job, self._objects)
        for role in job.trained:
            self._replicas[role].accumulate(self._flat[role])
        self._objects.start()
        self._shares = {r: Shares.of(groups, self._replicas[r].trained, job.cuts_optimizer(r)) for r in job.trained}
        self._publication = Publication(self._objects.shared_digest if job.run.verify_weights else None)
        snapshot = f"{self.role}.snapshot"
        others = peers(job, seat.gpu) if snapshot in written_by_peers(plan.programs["train"]) else ()
        self._peers = Peers.of(self._objects, snapshot, others, fds[2:])
        self._beside = Beside(plan.summary.policy, job, live, self._objects.device)

    # ---- the life of an engine

    @property
    def objects(self) -> PlannedObjects:
        return self._objects

    def export(self) -> dict[str, list[int]]:
        """Behind the pages of the snapshot comes that of its stamp."""
        found = self._objects.export()
        if (snapshot := f"{self.role}.snapshot") in found:
            found[snapshot].append(self._publication.page.export())
        return found

    def owners(self, name: str) -> tuple[int, ...]:
        """It owns what it reads: the pages that it maps are those that it writes into."""
        return tuple(self._peers.by_rank) if name == self._peers.name else ()

    def adopt(self, name: str, owner: int, fds: Sequence[int], step: str) -> None:
        self._peers.by_rank[owner].adopt(fds, step)

    def let_go(self, name: str, step: str) -> None:
        self._peers.let_go(step)

    def ready(self) -> dict[str, Any]:
        """Weights get their first values only now: the rollout engine, which has their pages, starts meanwhile."""
        self._fill()
        self._publication.start()
        self._copies.begin()
        inodes, pool = self._objects.inodes(), self._objects.pool
        return {"inodes": inodes, "peers": self._peers.inodes(), "pool_locked": pool.locked}

    def trained(self) -> dict[str, TrainedState]:
        return {role: self._trained(role) for role in self.job.trained}

    def _trained(self, role: str) -> TrainedState:
        model = self._replicas[role]
        weights = {name: model.weights[name] for name, _ in model.trained}
        counted = frozenset(name for name, _ in model.trained if model.counted(name))
        current, sums, undecayed = partial(self._state, role), partial(self._sums, role), self._undecayed(model)
        published = self._publication if role == self.role else None
        return TrainedState(
            role, self._label(role), model.trained, self._shares[role].own, self.state_dtype, weights, current,
            undecayed, counted, sums, published, self._objects.device, self._flat[role].told,
            partial(self._reduce, role),
        )  # fmt: skip

    def begin(self, iteration: int) -> None:
        self._work.begin()
        self._scores.begin()
        for role, loss in self._losses.items():
            loss.begin()
            if self._objects.mapped(f"{role}.gradients"):  # they stay where nothing leaves, with the last step's sums
                self._state(role, "gradients").zero_()

    def finish(self) -> EngineReport:
        self._work.groups.clear()
        self._objects.window(IDLE)
        self._objects.measuring = False
        sums = {f"{self._label(role)}loss": loss.total for role, loss in self._losses.items()}
        sums = sums if self._seat.speaks else {}  # tensor-parallel ranks know the same loss
        return EngineReport(self._scores.means(), sums, *self._objects.take_logs())

    def carried(self) -> Carried:
        return self._carried.carried()

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self._carried.restore(tensors, facts)
        self._publication.start()

    def save(self, path: Path) -> None:
        try:
            self._replicas[self.role].save(path)
        except (OSError, SafetensorError) as err:
            hint = "free space on this disk, and run again"
            raise RunError(f"cannot write the weights: {err}", where=path, hint=hint) from None

    def digests(self) -> dict[str, str]:
        names = dict.fromkeys(name for role in self.job.trained for name in self._replicas[role].objects.values())
        where = self._objects.device.torch
        return {name: digest(self._objects.current(name, self.dtype), device=where) for name in names}

    def close(self) -> None:
        self._work.groups.clear()
        self._peers.close()
        self._objects.close()
        self._publication.page.close()
        self._beside.close()
        self._ranks.close()

    # ---- tasks

    def may_begin(self, step: Run) -> bool:
        return step.task != "prefix" or self._beside.may_begin()

    def run(self, step: Run, inputs: Mapping[str, Any]) -> Values:
        inputs = self._work.of_taken(inputs)
        match step.task:
            case "prefix":
                with self._beside.prompt():
                    self._work.prefix(step, inputs)
            case "suffix" | "whole":
                self._work.suffix(step, inputs)
            case "train":
                self._work.train(step, inputs)
            case "prefix_backward":
                self._work.prefix_backward(step)
            case _:
                raise AssertionError(f"{step.task} is no task of a training rank")
        return {name: self._scores.scored(name) for name in step.outputs}

    def exchange(self, step: Exchange) -> None:
        """Gradients of all data-parallel ranks are summed: each has its prompts' part of the step's loss.

        Where each rank updates a share, it receives the sums of that, and all receive its new weights. Slabs of a
        rollout shard are written into the pages of its other ranks; a copy of the rollout engine's own is written over.
        """
        role = role_of(step.object)
        model, cut = self._replicas[role], self._shares[role]
        match step.group, step.op:
            case "refresh", "all_gather":
                self._copies.copy(step.object, step.nbytes)
            case "q", "write":
                self._write(model)
            case "dp", "all_reduce" | "reduce_scatter":
                self._reduce(role, step.op, range(cut.numel))
            case "dp", "all_gather":
                cut.all_gather(model.weights)
            case _:
                raise AssertionError(f"nobody plans {step}")

    def _write(self, model: RoleModel) -> None:
        """When all ranks have written their own slabs, and their stamps say so; the last one's bytes end it for all."""
        self._ranks.meet("tp")
        for pages in self._peers.pages(self.dtype):
            model.send(pages)
        self._objects.settle()
        self._ranks.meet("tp")

    def scale(self, step: Run, inputs: Mapping[str, Any]) -> float:
        return self._losses[step.role].scale(self._work.of_taken(inputs))

    def rebuild(self, step: Rebuild) -> None:
        self._replicas[self.role].rebuild(self._objects.pages(step.object, self.dtype))

    def _label(self, role: str) -> str:
        """What stands before the names of a role's metrics."""
        return "" if role == self.role else f"{role}_"

    def _reduce(self, role: str, op: str, elements: range) -> None:
        flat = self._state(role, "gradients")
        if op == "all_reduce":
            self._ranks.all_reduce(DP, flat[elements.start : elements.stop])
        else:
            self._shares[role].reduce_scatter(flat, elements)

    def _state(self, role: str, name: str) -> Tensor:
        """A role's gradients, master or moments where they are now."""
        return self._objects.current(f"{role}.{name}", self.state_dtype)

    def _fill(self) -> None:
        """Initial values: master copies, zero moments, and the weights of every role where the plan has them."""
        self._replicas[self.role].fill()
        for role in self.job.trained:
            model = self._replicas[role]
            self._shares[role].fill(self._state(role, "master"), model.fill_master)
            self._state(role, "moments").zero_()
            self._objects.filled(f"{role}.master", f"{role}.moments")
        for role, replica in self._replicas.items():
            for part, name in replica.objects.items():
                if role != self.role and role_of(name) == role:
                    self._objects.keep(name, self.dtype, partial(replica.initialise, part))

    def _undecayed(self, model: RoleModel) -> frozenset[str]:
        """Trained parameters whose tensors the job's patterns name: all of a parameter's, or none (ir/decay.py)."""
        left = self.job.optimizer.no_decay
        return frozenset(n for n, _ in model.trained if not all(decays(s, left) for s in model.sources(n)))

    def _sums(self, role: str, own: float) -> list[float]:
        """What every rank of one copy of the model has counted; of all copies, where each updates a share."""
        found = torch.tensor([own], dtype=torch.float64)
        if self._shares[role].cut:
            found = self._ranks.all_gather(DP, found)
        return self._ranks.all_gather("tp", found).tolist()
