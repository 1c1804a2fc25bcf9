"""On which GPUs the ranks of a parallel trainer are, and which of them hold one rollout shard together.

TP 2, EP 2, PP 2 on 16 GPUs    stage 0   0 1 | 2 3 | 4 5 | 6 7      stage 1   8 9 | 10 11 | 12 13 | 14 15
rollout TP 1, so q = 2         GPU 0 gathers its dense weights over   0 1 8 9
                               and its experts over                   0 1 2 3 8 9 10 11

Tensor-parallel ranks are neighbours; context, expert and data-parallel ones are copies of them; stages lie furthest
apart. Source: Megatron-Core, parallel_state.initialize_model_parallel (order tp-cp-ep-dp-pp, experts without cp).
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.ir.shards import Degrees


@dataclass(frozen=True)
class Rank:
    """A training rank by its places: of the stage, of the copy of that stage, and within tensor parallelism."""

    stage: int
    copy: int
    tensor: int


@dataclass(frozen=True)
class Ranks:
    """The training ranks of `gpus` GPUs, in rank order."""

    degrees: Degrees
    gpus: int

    @property
    def of_stage(self) -> int:
        """GPUs of one pipeline stage."""
        return self.gpus // self.degrees.pp

    def rank(self, gpu: int) -> Rank:
        """The rank on a GPU."""
        stage, place = divmod(gpu, self.of_stage)
        return Rank(stage, *divmod(place, self.degrees.tp))

    def gpu(self, rank: Rank) -> int:
        """The GPU of a rank."""
        return rank.stage * self.of_stage + rank.copy * self.degrees.tp + rank.tensor

    def gathered(self, gpu: int, tensors: int, experts: bool) -> tuple[int, ...]:
        """GPUs that have a GPU's rollout shard together: `tensors` neighbours of every stage, and of every EP rank."""
        at, ep = self.rank(gpu), self.degrees.ep if experts else 1
        first, copy = at.tensor - at.tensor % tensors, at.copy - at.copy % ep
        return tuple(
            self.gpu(Rank(stage, copy + c, first + t))
            for stage in range(self.degrees.pp)
            for c in range(ep)
            for t in range(tensors)
        )

    def spans_nodes(self, tensors: int, experts: bool, per_node: int) -> bool:
        """Whether some GPU has its rollout shard together with GPUs of other nodes."""
        groups = (self.gathered(gpu, tensors, experts) for gpu in range(self.gpus))
        return any(len({gpu // per_node for gpu in group}) > 1 for group in groups)
