"""The shape of a model, as its config.json states it: sizes of tensors, of shards, and of a token's KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from rollplex.ir.errors import JobError

Part = Literal["vision", "language"]
Family = Literal["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2", "qwen3", "llama"]

# Kinds whose rows follow the KV heads: an engine repeats them on several ranks when it has more ranks than KV heads.
_KV_KINDS = frozenset({"k", "v", "k_bias", "v_bias"})
_VOCAB_KINDS = frozenset({"embed", "head"})


@dataclass(frozen=True)
class Tensor:
    """One parameter under its Hugging Face name; `axis` is the dimension that tensor parallelism cuts, if any."""

    name: str
    shape: tuple[int, ...]
    part: Part
    kind: str
    layer: int | None = None
    axis: int | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class VisionSpec:
    """The vision tower and its projector."""

    hidden: int
    depth: int
    heads: int
    ffn: int
    patch: int
    temporal_patch: int
    merge: int
    window: int | None
    fullatt_blocks: tuple[int, ...]
    out_hidden: int
    channels: int = 3
    positions: int | None = None
    deepstack: tuple[int, ...] = ()

    def max_visual_tokens(self, frames: int, max_pixels: int) -> int:
        """The most tokens a video can take when no frame exceeds `max_pixels` (the processor's bound)."""
        per_frame = max(1, max_pixels // (self.patch * self.merge) ** 2)
        return math.ceil(frames / self.temporal_patch) * per_frame


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts: which layers have them, how many, how many a token uses, and their width."""

    experts: int
    per_token: int
    ffn: int
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Adapters:
    """LoRA: which linear layers have a pair of matrices A [rank, in] and B [out, rank] beside them, and how it is cut.

    `fused` are the classes of weights (`qkv`, `gate_up`, `expert_gate_up`) whose parts share one pair; tensor
    parallelism cuts both matrices of a pair (`split`), or only the one that lies along the cut of its layer.
    """

    rank: int
    targets: tuple[str, ...]
    fused: frozenset[str] = frozenset()
    split: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """A model by its dimensions; everything else about its size is arithmetic.

    With `adapters` it is what LoRA trains of that model: the same dimensions, and no parameters but A and B.
    """

    name: str
    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    vision: VisionSpec | None = None
    moe: MoeSpec | None = None
    vocab_multiple: int = 64
    head: Literal["logits", "scalar"] = "logits"
    adapters: Adapters | None = None
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def tensors(self) -> tuple[Tensor, ...]:
        """Every parameter once, in the order and under the names of transformers' `named_parameters()`."""
        from rollplex.ir.adapters import adapter_tensors  # both enumerations need this class
        from rollplex.ir.tensors import model_tensors

        return adapter_tensors(self) if self.adapters else model_tensors(self)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied embedding counts once."""
        return self.language_parameters + self.vision_parameters

    @property
    def language_parameters(self) -> int:
        """Parameters outside the vision tower and its projector."""
        return _parameters(self, "language")

    @property
    def active_parameters(self) -> int:
        """Language parameters that one token meets: of the routed experts only those it is sent to."""
        if self.moe is None:
            return self.language_parameters
        routed = sum(t.numel for t in self.tensors() if t.kind in ("expert_gate_up", "expert_down"))
        return self.language_parameters - routed * (self.moe.experts - self.moe.per_token) // self.moe.experts

    @property
    def vision_parameters(self) -> int:
        """Parameters of the vision tower and its projector."""
        return _parameters(self, "vision")

    @property
    def outputs(self) -> int:
        """Numbers that the model gives for a token: a logit a vocabulary row, or the one of a value or score head."""
        return self.vocab if self.head == "logits" else 1

    def padded_vocab(self, tp: int = 1) -> int:
        """Rows of embedding and head in the engines: vLLM pads to 64 whatever the TP, and every engine must agree."""
        rows = math.ceil(self.vocab / self.vocab_multiple) * self.vocab_multiple
        if rows % tp:
            raise JobError(f"{self.name}: {rows} padded vocabulary rows do not divide by tensor_parallel {tp}")
        return rows

    def kv_heads_per_rank(self, tp: int = 1) -> int:
        """KV heads one rank holds; with more ranks than KV heads each head is repeated."""
        return max(1, self.kv_heads // tp)

    def kv_bytes_per_token(self, tp: int = 1, itemsize: int = 2) -> int:
        """Bytes one rank keeps for one token: keys and values of every layer."""
        return 2 * self.layers * self.kv_heads_per_rank(tp) * self.head_dim * itemsize

    def shard_shape(self, tensor: Tensor, tp: int) -> tuple[int, ...]:
        """Shape of one rank's piece in a rollout engine: vocabulary padded, KV rows repeated when tp > kv_heads."""
        shape = list(tensor.shape)
        if tensor.kind in _VOCAB_KINDS:
            shape[0] = self.padded_vocab(tp)
        if tensor.axis is not None:
            ways = min(tp, self.kv_heads) if tensor.kind in _KV_KINDS else tp
            assert shape[tensor.axis] % ways == 0, (tensor, tp)
            shape[tensor.axis] //= ways
        return tuple(shape)

    def shard_numel(self, tensor: Tensor, tp: int) -> int:
        """Elements of one rank's piece (see `shard_shape`)."""
        return math.prod(self.shard_shape(tensor, tp))

    def rank_parameters(self, tp: int, part: Part | None = None) -> int:
        """Parameters one rank holds of a part, or of the whole model; the vision tower is replicated."""
        return _rank_parameters(self, tp, part)

    def tp_by_heads(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that divide the attention heads."""
        return tuple(tp for tp in range(1, self.heads + 1) if self.heads % tp == 0)

    def legal_tp(self) -> tuple[int, ...]:
        """Degrees that divide heads, KV heads (or repeat them evenly), feed-forward and vocabulary."""
        return tuple(tp for tp in self.tp_by_heads() if not self.tp_obstacles(tp))

    def tp_obstacles(self, tp: int) -> tuple[str, ...]:
        """What this degree does not divide, a phrase each; empty when it is legal."""
        ffn = self.moe.ffn if self.moe else self.ffn
        rows = self.padded_vocab()
        checks = (
            (self.heads % tp == 0, f"the {self.heads} attention heads"),
            (
                self.kv_heads % tp == 0 or tp % self.kv_heads == 0,
                f"the {self.kv_heads} KV heads, nor is it a multiple of them",
            ),
            (ffn % tp == 0, f"the {'expert ' if self.moe else ''}feed-forward width {ffn}"),
            (rows % tp == 0, f"the {rows} padded vocabulary rows"),
        )
        return tuple(what for legal, what in checks if not legal)


# Remedies ask a hundred jobs of one model for these sums over every tensor.


@lru_cache(maxsize=256)
def _parameters(spec: ModelSpec, part: Part) -> int:
    return sum(t.numel for t in spec.tensors() if t.part == part)


@lru_cache(maxsize=256)
def _rank_parameters(spec: ModelSpec, tp: int, part: Part | None) -> int:
    return sum(spec.shard_numel(t, tp) for t in spec.tensors() if part in (None, t.part))
