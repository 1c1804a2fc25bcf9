"""A role's model on one training rank: Megatron's modules whose parameters are views of planned objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from rollplex.backends.collectives import Groups
from rollplex.backends.data.prompts import Prompt
from rollplex.backends.facts import load_facts
from rollplex.backends.megatron import memory
from rollplex.backends.megatron.memory import Slab
from rollplex.backends.megatron.names import Parameter, Piece, Stored, parameters
from rollplex.backends.megatron.rank import MegatronModel
from rollplex.backends.megatron.weights import fill, load_weights
from rollplex.backends.memory.planned import PlannedObjects
from rollplex.backends.shard import Shard, shard_of
from rollplex.backends.training.boundary import Begins, PrefixResult
from rollplex.backends.training.gradients import FlatGradients
from rollplex.backends.training.placement import DTYPES, PARTS, drawn, weight_objects
from rollplex.backends.training.saved import SavedPolicy
from rollplex.ir.job import Job
from rollplex.ir.placement import Seat
from rollplex.ir.plan import Plan
from rollplex.ir.spec import Part


class Replica:
    """`RoleModel` of one tensor-parallel rank. The policy's language part lies in a rollout rank's shard."""

    def __init__(self, plan: Plan, job: Job, seat: Seat, groups: Groups, role: str, objects: PlannedObjects) -> None:
        self.job, self.role = job, role
        self.dtype = DTYPES[job.model.dtype]
        policy = role == job.policy
        self.objects: dict[Part, str] = weight_objects(job, role, objects.has)
        pages: dict[Part, Tensor] = {p: objects.pages(n, self.dtype) for p, n in self.objects.items()}
        self._seat, stored = seat, Stored.planned(plan.summary.layout)
        self._shard = _shard(plan, job, seat.tp // job.q)
        self._stored = stored if policy else Stored()
        self._pages = pages["language"]
        case3 = f"{role}.case3"
        self._buffer = objects.pages(case3, self.dtype) if policy and objects.has(case3) else None
        self._rank = MegatronModel(
            job.spec, self.dtype, pages, groups.handle("tp"),
            self._stored,
            Slab(seat.tp % job.q, job.q) if policy else Slab(),
            job.roles[role].freeze if policy else PARTS,
            job.trainer(role).sequence_parallel,
        )  # fmt: skip

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self._rank.views

    @property
    def trained(self) -> tuple[tuple[str, int], ...]:
        return tuple((p.name, p.numel) for p in self._rank.trained)

    def counted(self, name: str) -> bool:
        return any(p.name == name for p in self._rank.counted)

    def sources(self, name: str) -> tuple[str, ...]:
        return tuple(piece.source for p in self._rank.trained if p.name == name for piece in p.pieces)

    def boundary_shape(self, prefix_tokens: int) -> tuple[int, int, int, int, int]:
        return self._rank.boundary_shape(prefix_tokens)

    def prefix(
        self, prompt: Prompt, slot: Tensor, attached: bool, saved: SavedPolicy | None, before: Sequence[Tensor]
    ) -> PrefixResult:
        assert not before, "a plan in which Megatron runs several turns is refused"
        return self._rank.prefix(prompt, slot, attached=attached, saved=saved)

    def logprobs(
        self, prefix: PrefixResult, kv: Tensor, responses: Sequence[Tensor], temperature: float, recompute: bool
    ) -> Tensor:
        found = self._rank.logprobs(prefix, kv, [r.to(kv.device) for r in responses], temperature, recompute=recompute)
        return found.cpu()

    def values(self, prefix: PrefixResult, kv: Tensor, responses: Sequence[Tensor], recompute: bool) -> Tensor:
        raise AssertionError("a plan in which Megatron runs a model with a scalar head is refused")

    scores = values

    def whole(self, prompt: Prompt, response: Tensor, head: str, temperature: float, recompute: bool) -> Tensor:
        raise AssertionError("a plan in which Megatron runs a call that is not split is refused")

    def prefix_backward(self, prefix: PrefixResult, kv_grads: Tensor, begins: Begins) -> None:
        self._rank.prefix_backward(prefix, kv_grads, begins)

    def accumulate(self, into: FlatGradients) -> None:
        self._rank.accumulate(into)

    def fill(self) -> None:
        """Also the slabs of the shard's other ranks, and what is rebuilt: the first rollout reads them."""
        for j in range(self.job.q):
            rank = self._seat.tp // self.job.q * self.job.q + j
            every = parameters(self.job.spec, self.job.train_tp, rank, self._stored)
            order = [p for p in every if p.part == "language"]
            self._initialise(order, memory.views(self._pages, order, Slab(j, self.job.q)))
        self._initialise(self._rank.of("vision"), self._rank.views)
        if self._buffer is not None:
            self.rebuild(self._buffer)

    def fill_master(self, masters: Mapping[str, Tensor]) -> None:
        order = [p for p in self._rank.trained if p.name in masters]
        self._initialise(order, {p.name: masters[p.name].view(p.shape) for p in order})

    def initialise(self, part: Part, flat: Tensor) -> None:
        order = self._rank.of(part)
        self._initialise(order, memory.views(flat, order))

    def send(self, peer: Tensor) -> None:
        self._shard.send(self._seat.tp % self.job.q, self._pages, peer)

    def rebuild(self, buffer: Tensor) -> None:
        self._shard.rebuild(self._pages, buffer)

    def save(self, path: Path) -> None:
        self._rank.save(path)

    def _initialise(self, order: Sequence[Parameter], views: Mapping[str, Tensor]) -> None:
        """From the directory `run.weights`, or numbers drawn from `run.seed`."""
        if self.job.run.weights is not None:
            load_weights(self.job.run.weights, order, views)
            return
        shapes = {t.name: t.shape for t in self.job.spec.tensors()}

        @lru_cache(8)  # pieces of q, k and v take turns
        def whole(name: str) -> Tensor:
            return drawn(name, shapes[name], self.job.run.seed)

        def read(piece: Piece) -> Tensor:
            return whole(piece.source).narrow(piece.axis, piece.start, piece.stop - piece.start)

        fill(order, views, read)


def _shard(plan: Plan, job: Job, rank: int) -> Shard:
    """Where a rollout rank's engine looks for the policy's language tensors."""
    trainer, roller = (load_facts(plan.processes[kind].engine) for kind in ("train", "rollout"))
    return shard_of(job.spec, plan.summary.layout, trainer, roller, job.rollout_tp, rank)
