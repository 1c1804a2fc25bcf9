"""Weight order of vLLM: stacked parts on every rank; its memory is a setting of the job (KV cache and runtime)."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.backends.facts import Block, Work
from rollplex.backends.ordering import stacked
from rollplex.ir.models import ModelSpec


@dataclass(frozen=True)
class VllmFacts:
    """vLLM 0.20 and later, unquantised weights; a plugin's layers may re-index what QKV and gate/up give."""

    name: str = "vllm"
    trains: bool = False
    rolls_out: bool = True
    runs: bool = False
    whole_sequences: bool = False
    overlaps_update: bool = False
    # Fused experts assert `w2.stride(-1) == 1` and split gate and up inside their kernels.
    transposed: frozenset[str] = frozenset({"o", "down"})
    split_views: frozenset[str] = frozenset()
    fuses: frozenset[str] = frozenset({"qkv", "gate_up", "expert_gate_up"})
    reindexes: frozenset[str] = frozenset({"qkv", "gate_up"})

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
