"""What one rank of a parallel training engine holds of a model: tensor, pipeline, context and expert parallelism.

    stage 0             embedding, vision tower, layers 0 .. L/pp - 1 (or as many as the job states)
    stage pp-1          layers .. L-1, final norm, head (or the copy of a tied embedding)
    tensor parallel     every sharded tensor over tp ranks           expert parallel     whole experts over ep ranks
    context parallel    nothing: weights are repeated, tokens are cut

Stages differ, programs do not: a plan holds for every rank, so a size is that of the stage that has most of it.
Source: Megatron-Core (parallel_state, gpt_model, experts); Narayanan et al. 2021, arXiv 2104.04473.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rollplex.ir.spec import ModelSpec, Part, Tensor

EXPERTS = frozenset({"expert_gate_up", "expert_down"})


@dataclass(frozen=True)
class Degrees:
    """How many ways an engine cuts a model (tp, pp, ep) and its tokens (cp), and how often it repeats it (dp)."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    first: int | None = None
    """Layers of the first stage; None is an even share. The same for the last."""
    last: int | None = None

    @property
    def model(self) -> int:
        """GPUs that work on one sequence together."""
        return self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks with the same dense weights, over which their gradients are reduced."""
        return self.dp * self.cp

    def __str__(self) -> str:
        named = (("PP", self.pp), ("CP", self.cp), ("EP", self.ep))
        return " ".join([f"TP{self.tp}", *(f"{name}{size}" for name, size in named if size > 1)])


def stage_layers(layers: int, degrees: Degrees) -> tuple[int, ...]:
    """Layers of each stage: as stated for the first and the last, dealt out evenly over the others.

    Source: Megatron-Core transformer_block.get_num_layers_to_build.
    """
    first, last = ((n,) if n is not None else () for n in (degrees.first, degrees.last))
    between = degrees.pp - len(first) - len(last)
    left = layers - sum(first) - sum(last)
    return (*first, *((i + 1) * left // between - i * left // between for i in range(between)), *last)


@lru_cache(maxsize=512)
def _stage_of_layer(layers: int, degrees: Degrees) -> tuple[int, ...]:
    sizes = stage_layers(layers, degrees)
    return tuple(stage for stage, size in enumerate(sizes) for _ in range(size))


def stages_of(spec: ModelSpec, tensor: Tensor, degrees: Degrees) -> tuple[int, ...]:
    """The pipeline stages that hold a tensor: one, or for a tied embedding the first and the last."""
    end = degrees.pp - 1
    if tensor.part == "vision":
        return (0,)
    if tensor.kind == "embed":
        return (0, end) if spec.tied and end else (0,)
    return (end,) if tensor.layer is None else (_stage_of_layer(spec.layers, degrees)[tensor.layer],)


def rank_numel(spec: ModelSpec, tensor: Tensor, degrees: Degrees) -> int:
    """Elements that a rank of the tensor's stage holds of it."""
    numel = spec.shard_numel(tensor, degrees.tp)
    return numel // degrees.ep if tensor.kind in EXPERTS else numel


@lru_cache(maxsize=512)
def stage_parameters(spec: ModelSpec, degrees: Degrees, stage: int, part: Part) -> tuple[int, int]:
    """Elements that a rank of a stage holds of a part: dense ones, and of experts."""
    dense = experts = 0
    for tensor in spec.tensors():
        if part != tensor.part or stage not in stages_of(spec, tensor, degrees):
            continue
        numel = rank_numel(spec, tensor, degrees)
        dense, experts = (dense, experts + numel) if tensor.kind in EXPERTS else (dense + numel, experts)
    return dense, experts


def rank_parameters(spec: ModelSpec, degrees: Degrees, *parts: Part) -> int:
    """Parameters of these parts together on the rank that holds most of them."""
    return max(sum(sum(stage_parameters(spec, degrees, stage, p)) for p in parts) for stage in range(degrees.pp))


def owned_parameters(spec: ModelSpec, degrees: Degrees, *parts: Part) -> int:
    """Parameters whose optimizer state a rank keeps when that state is cut over all ranks that repeat them.

    Dense parameters are repeated dp x cp times, an expert's dp x cp / ep times.
    """
    return max(_owned(spec, degrees, parts, stage) for stage in range(degrees.pp))


def _owned(spec: ModelSpec, degrees: Degrees, parts: tuple[Part, ...], stage: int) -> int:
    held = [stage_parameters(spec, degrees, stage, part) for part in parts]
    dense, experts = sum(h[0] for h in held), sum(h[1] for h in held)
    return -(-dense // degrees.replicas) + -(-experts * degrees.ep // degrees.replicas)
