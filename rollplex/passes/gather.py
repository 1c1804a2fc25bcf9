"""What each GPU has of its rollout shard when an update ends, and what it gathers of the others, class by class.

TP 2, PP 2, rollout TP 1    gate_up of stage 0   [t0][t1]        GPU (t0, stage 0) has one of four quarters
                            gate_up of stage 1   [t0][t1]        and receives three; all four gather the same shard
                            embedding, head      of the first and of the last stage only
                            experts, EP 2        whole experts, each cut over t: one of eight pieces

The rollout engine holds all layers and all experts on every GPU, cut over its own tensor-parallel ranks alone. The sums
are exact; stages and ranks differ, and a plan tells the GPU that receives most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from rollplex.ir.job import Job
from rollplex.ir.lora import lora_of, served_bytes
from rollplex.ir.ranks import Rank, Ranks
from rollplex.ir.shards import EXPERTS, stages_of
from rollplex.ir.work import trains_vision
from rollplex.passes.costs import Costs
from rollplex.passes.layout_options import WeightClass


@dataclass(frozen=True)
class Gathered:
    """One class of weights: over how many GPUs it is gathered, and the most bytes that one of them sends."""

    group: int
    receives_bytes: int
    sends_bytes: int


@dataclass(frozen=True)
class Pieces:
    """One class of weights as the training ranks own it."""

    job: Job
    weights: WeightClass

    @property
    def frozen(self) -> bool:
        """Whether it is a base under LoRA: nothing of it changes, and nothing is exchanged."""
        return lora_of(self.job) is not None

    @property
    def experts(self) -> bool:
        """Whether it is dealt out to the expert-parallel ranks."""
        return self.weights.tensors[0].kind in EXPERTS

    @property
    def ways(self) -> int:
        """Expert-parallel ranks that it is dealt out to."""
        return self.job.degrees(self.job.policy).ep if self.experts else 1

    @cached_property
    def staged_bytes(self) -> tuple[int, ...]:
        """Of the rollout shard, the bytes of each stage's tensors; a tied embedding is on the first and the last."""
        job, spec = self.job, self.job.spec
        degrees = job.degrees(job.policy)
        found = [0] * degrees.pp
        for tensor in self.weights.tensors:
            for stage in stages_of(spec, tensor, degrees):
                found[stage] += spec.shard_numel(tensor, job.rollout_tp) * job.itemsize
        return tuple(found)

    @cached_property
    def _has(self) -> tuple[tuple[Fraction, ...], ...]:
        """[t][u]: of what the GPU of tensor rank t needs of a matrix, the share that tensor rank u owns."""
        orders, q, tp = self.weights.orders, self.job.q, self.job.train_tp
        if orders is not None:
            return orders.shares
        cut = self.weights.tensors[0].axis is not None
        own = Fraction(1, q) if cut else Fraction(1)
        return tuple(tuple(own if u == t or (cut and u // q == t // q) else Fraction(0) for u in range(tp))
                     for t in range(tp))  # fmt: skip

    @cached_property
    def tensors(self) -> int:
        """Neighbouring tensor ranks that have together what each of their GPUs needs: q, more where K and V repeat."""
        tp = self.job.train_tp
        widths = (w for w in range(self.job.q, tp + 1, self.job.q) if tp % w == 0)
        return next(w for w in widths if all(_within(row, t - t % w, w) for t, row in enumerate(self._has)))

    def received(self, tensor: int, stage: int) -> int:
        """Bytes that the GPU of this rank lacks."""
        return 0 if self.frozen else self.weights.shard_bytes - self.own(tensor, tensor, stage)

    def own(self, tensor: int, other: int, stage: int) -> int:
        """Of what the GPU of tensor rank `tensor` needs, the bytes that tensor rank `other` of a stage owns."""
        return int(self.staged_bytes[stage] * self._has[tensor][other] / self.ways)

    def sent(self, tensor: int, stage: int) -> int:
        """Bytes that all others which need them take of this rank, each directly: what a broadcast would send."""
        degrees = self.job.degrees(self.job.policy)
        holders = len(stages_of(self.job.spec, self.weights.tensors[0], degrees))
        takers = self.ways * (degrees.pp - holders + 1)
        wanted = sum(self.own(taker, tensor, stage) for taker in range(degrees.tp))
        return 0 if self.frozen else takers * wanted - self.own(tensor, tensor, stage)

    @property
    def group(self) -> int:
        """GPUs that gather it from each other; replicated tensors go with the others of their stages."""
        pp = self.job.stages
        alone = self.frozen or (self.weights.tensors[0].axis is None and pp == 1)
        return 1 if alone else self.tensors * pp * self.ways


def _within(row: tuple[Fraction, ...], first: int, width: int) -> bool:
    return not any(share for u, share in enumerate(row) if not first <= u < first + width)


@dataclass(frozen=True)
class Gather:
    """The exchange after an update, on the GPU that receives most: rank `tensor` of pipeline stage `stage`."""

    job: Job
    classes: tuple[WeightClass, ...]

    @cached_property
    def pieces(self) -> tuple[Pieces, ...]:
        """Every class as it is owned."""
        return tuple(Pieces(self.job, c) for c in self.classes)

    @cached_property
    def ranks(self) -> tuple[tuple[int, int], ...]:
        """Tensor rank and stage of every GPU of one copy of the model."""
        return tuple((t, s) for s in range(self.job.stages) for t in range(self.job.train_tp))

    def received(self, tensor: int, stage: int) -> int:
        """Bytes of the language model that the GPU of a training rank receives."""
        return sum(p.received(tensor, stage) for p in self.pieces)

    @cached_property
    def fullest(self) -> tuple[int, int]:
        """The rank of a GPU that receives most of the language model."""
        return max(self.ranks, key=lambda at: self.received(*at))

    def of(self, p: Pieces) -> Gathered:
        """What a plan says of a class: bytes that the fullest GPU receives of it, most bytes that any GPU sends."""
        return Gathered(p.group, p.received(*self.fullest), max(p.sent(*at) for at in self.ranks))

    @property
    def tower_bytes(self) -> int:
        """What GPUs of other stages than the first receive of a trained tower, with which all of them roll out."""
        job = self.job
        return job.spec.vision_parameters * job.itemsize if job.stages > 1 and trains_vision(job, job.policy) else 0

    def _tower(self, stage: int) -> int:
        return self.tower_bytes if stage else 0

    # ---- over the network

    @cached_property
    def between_nodes_bytes(self) -> int:
        """A GPU's share of what its node receives of others, on the node that receives most.

        The GPUs of a node that gather one shard fetch it once and pass it on, as a ring over all of them does.
        """
        per_node, ranks = self.job.cluster.gpus_per_node, Ranks(self.job.degrees(self.job.policy), self.job.gpus)
        if self.job.cluster.nodes == 1:
            return 0
        d = ranks.degrees
        period = min(ranks.of_stage, math.lcm(d.tp * d.ep, per_node))
        gpus = (s * ranks.of_stage + g for s in range(d.pp) for g in range(period))
        return max(self._from_others(ranks, gpu, per_node) for gpu in gpus)

    def _from_others(self, ranks: Ranks, gpu: int, per_node: int) -> int:
        total = 0
        for (tensors, experts), pieces in self._by_group.items():
            near = [g for g in ranks.gathered(gpu, tensors, experts) if g // per_node == gpu // per_node]
            total += sum(_lacking(p, ranks, gpu, near) for p in pieces) // len(near)
        at = ranks.rank(gpu)
        first = ranks.gpu(Rank(0, at.copy, at.tensor))
        return total + (self._tower(at.stage) // ranks.degrees.tp if first // per_node != gpu // per_node else 0)

    @cached_property
    def _by_group(self) -> dict[tuple[int, bool], list[Pieces]]:
        found: dict[tuple[int, bool], list[Pieces]] = {}
        for p in (p for p in self.pieces if p.group > 1):
            found.setdefault((p.tensors, p.experts), []).append(p)
        return found

    @property
    def seconds(self) -> float:
        """The slower of NVLink and the network, a ring uses both at a time; then the adapters that are served."""
        costs, cluster = Costs(self.job), self.job.cluster
        network = self.between_nodes_bytes * cluster.gpus_per_node / (cluster.internode_gb_s * 1e9)
        most = max(self.received(tensor, stage) + self._tower(stage) for tensor, stage in self.ranks)
        return max(costs.exchange_s(most), network) + costs.exchange_s(served_bytes(self.job))


def _lacking(p: Pieces, ranks: Ranks, gpu: int, near: list[int]) -> int:
    """Of what a GPU needs of a class, the bytes that no GPU of its node has."""
    at = ranks.rank(gpu)
    places = {(r.stage, r.copy % p.ways, r.tensor) for r in map(ranks.rank, near)}
    if p.weights.tensors[0].axis is None:
        places = {(stage, 0, at.tensor) for stage, _, _ in places}
    had = sum(p.own(at.tensor, tensor, stage) for stage, _, tensor in places)
    return max(0, p.weights.shard_bytes - had)
