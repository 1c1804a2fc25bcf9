"""Weight order of vLLM: stacked parts on every rank; its memory is a setting of the job (KV cache and runtime)."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.backends.facts import Block
from rollplex.backends.ordering import stacked
from rollplex.backends.vllm import environment, versions
from rollplex.ir.errors import Problem
from rollplex.ir.models import ModelSpec
from rollplex.ir.serving import Serving
from rollplex.ir.work import Work

SAMPLER_BYTES = 2 + 4 + 4 + 8 + 4 + 4
"""A logit of a sequence, gathered over ranks: bf16, FP32, sorted with its index, probability, running sum."""
ALL_REDUCE_BYTES = (2 * 8 + 8) << 20
"""Of a rank of several: two buffers and a table of vLLM's all-reduce; where it takes more it is off (sampler.py)."""
GRAPH_BYTES = 2**30
"""CUDA graphs of a decode engine; an assumption, engines log 0.5 to 1.5 GiB."""


def _step_bytes(s: Serving) -> int:
    """Live in one layer of a step of `batched_tokens`: residual and its norm, the wider of attention and MLP."""
    spec = s.spec
    mlp = 3 * spec.ffn // s.tp
    if spec.moe is not None:
        mlp = spec.moe.per_token * (2 * spec.hidden + 3 * spec.moe.ffn // s.tp)
    attention = (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim // s.tp
    return s.batched_tokens * (2 * spec.hidden + max(mlp, attention)) * s.itemsize


def _image_bytes(s: Serving) -> int:
    """The tower over as many patches as a step takes visual tokens, at least one image, and their embeddings."""
    vision = s.spec.vision
    if vision is None:
        return 0
    tokens = max(s.image_tokens, min(s.batched_tokens, s.image_tokens * s.sequences))
    block = 5 * vision.hidden + 3 * vision.ffn // s.tower_ways
    return tokens * (vision.merge**2 * block + s.spec.hidden) * s.itemsize


@dataclass(frozen=True)
class VllmFacts:
    """vLLM 0.20 and later, unquantised weights; a plugin's layers may re-index what QKV and gate/up give.

    Without `enable_expert_parallel` every rank has all experts, each cut along its width over the ranks.
    """

    name: str = "vllm"
    trains: bool = False
    rolls_out: bool = True
    runs: bool = True
    on_cpu: bool = True
    families: frozenset[str] = frozenset({"qwen2_5_vl"})
    large_cpu_blocks: bool = True
    cpu_head_dims: tuple[int, ...] = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
    whole_sequences: bool = False
    overlaps_update: bool = False
    # Fused experts assert `w2.stride(-1) == 1` and split gate and up inside their kernels.
    transposed: frozenset[str] = frozenset({"o", "down"})
    split_views: frozenset[str] = frozenset()
    fuses: frozenset[str] = frozenset({"qkv", "gate_up", "expert_gate_up"})
    reindexes: frozenset[str] = frozenset({"qkv", "gate_up"})
    # MaxLoRARanks of vllm/config/lora.py: buffers of a larger rank are filled in part, the rest is zero.
    all_reduce_bytes: int = ALL_REDUCE_BYTES
    adapter_ranks: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256, 320, 512)

    def lacking(self, cpu: bool) -> Problem | None:
        """What keeps this machine from running it: no vLLM, one of another version or form, a setting of the user's."""
        found = versions.installed()
        if problem := versions.lacking(found, cpu) or environment.refused():
            return problem
        return versions.changed(found, cpu) if found else None

    def communicators(self, spec: ModelSpec) -> tuple[str, ...]:
        """Of NCCL, over the same ranks: vLLM's own all-reduces, torch's gathers logits; experts have one too.

        Source: vllm/distributed 0.20, parallel_state.py (groups of one rank have none, `world` never sends),
        device_communicators/cuda_communicator.py, base_device_communicator.all_gather.
        """
        return ("tp", "logits", *(("ep",) if spec.moe else ()))

    def profile_bytes(self, serving: Serving) -> int:
        """The larger of a language step and the largest image's tower, the sampler's logits, and CUDA graphs."""
        sampler = serving.sequences * SAMPLER_BYTES * serving.spec.padded_vocab()
        return max(_step_bytes(serving), _image_bytes(serving)) + sampler + GRAPH_BYTES

    def rows(self, spec: ModelSpec, fused: str, tp: int, rank: int) -> tuple[Block, ...]:
        """`[Q_R; K_R; V_R]` and `[gate_R; up_R]`."""
        return stacked(spec, fused, tp, rank)

    def prefix_saved_bytes(self, work: Work) -> int:
        """vLLM does not train."""
        raise AssertionError("vllm does not train")

    def prefix_workspace_bytes(self, work: Work, attached: bool) -> int:
        """vLLM does not train."""
        raise AssertionError("vllm does not train")

    score_workspace_bytes = prefix_saved_bytes
    train_activation_bytes = prefix_saved_bytes
    full_activation_bytes = prefix_saved_bytes


FACTS = VllmFacts()
