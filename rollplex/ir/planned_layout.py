"""What a plan says of the layout of the actor's weights: classes of tensors, cases, exchange, placement of ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollplex.ir.steps import Seconds, Strict, Whole


class CaseBytes(Strict):
    """Parameters of one layout case and their bytes over the whole model (language model, as in paper section 4.4)."""

    params: Whole
    bytes: Whole


class TensorPlacement(Strict):
    """Where one tensor of the actor lies for both engines."""

    name: str
    case: Literal[1, 2, 3]
    slabs: Whole = Field(default=1, description="contiguous pieces in which a training rank owns its part")
    why: str


class LayoutClass(Strict):
    """Tensors that the engines fuse or store alike, over all layers: how they lie, and what one GPU exchanges."""

    name: str
    view: Literal["alias", "slabs", "interleave", "reindex", "transpose", "rebuild"]
    case: Literal[1, 2, 3]
    tensors: Whole
    params: Whole
    slabs: Whole = Field(description="slabs of one matrix that a training rank owns, each one copy to a peer")
    pieces: Whole = Field(description="matrices in a tensor: the experts of a stack, or one")
    shard_bytes: Whole = Field(description="one rollout rank's shards")
    buffer_bytes: Whole
    group: Whole = Field(
        default=1,
        description="GPUs that write it to each other: q, times pipeline stages, times EP for experts",
    )
    sends_bytes: Whole = Field(description="most that a GPU sends in its group after an update")
    receives_bytes: Whole = Field(description="of the GPU that receives most of all classes together")
    decode_s: Seconds = Field(description="predicted seconds that reading it so adds to a step")
    rebuild_s: Seconds
    needs: str = Field(default="", description="what an engine must be taught; empty when it can as it comes")
    why: str


class LayoutAlternative(Strict):
    """What another row order would give."""

    order: Literal["stock", "reindex", "auto"]
    cases: dict[str, CaseBytes]
    case3_buffer_bytes: Whole
    seconds: Seconds = Field(description="predicted seconds that the layout adds to a step")


class LayoutSummary(Strict):
    """The TP-sharing layout: paper section 3.3."""

    q: Whole
    order: Literal["stock", "reindex", "auto"]
    cases: dict[str, CaseBytes]
    case3_buffer_bytes: Whole
    exchange_bytes_per_gpu: Whole = Field(description="of the language model, on the GPU that receives most")
    tower_bytes: Whole = Field(
        default=0, description="beside it, a trained vision tower on GPUs of pipeline stages that do not train it"
    )
    between_nodes_bytes: Whole = Field(default=0, description="a GPU's share of what its node receives of others")
    exchange_s: Seconds = Field(description="predicted seconds of the exchange over NVLink and between nodes")
    placement: dict[str, tuple[Whole, ...]] = Field(
        description="rollout engine -> GPUs of a training group, by rollout rank"
    )
    groups: Whole = Field(description="tensor-parallel groups of all stages and copies; all place their engines alike")
    classes: tuple[LayoutClass, ...]
    needs: tuple[str, ...] = Field(description="what the engines must be taught for it")
    alternatives: tuple[LayoutAlternative, ...]
    tensors: tuple[TensorPlacement, ...]
