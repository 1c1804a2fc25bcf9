"""The host engine for the compiler: Hugging Face's weight order on both sides, and the sizes of its work."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.backends.facts import Block, Work
from rollplex.backends.ordering import stacked
from rollplex.ir.models import ModelSpec


def _layer(work: Work) -> int:
    s = work.spec
    return (16 * s.hidden + (4 * s.heads + 4 * s.kv_heads) * s.head_dim + 6 * s.ffn) * work.itemsize


def _block(work: Work) -> int:
    v = work.spec.vision
    return (16 * v.hidden + 6 * v.ffn) * work.itemsize if v else 0


@dataclass(frozen=True)
class HostFacts:
    """transformers' Qwen2.5-VL modules on CPU processes: trainer, scorer and rollout engine."""

    name: str = "host"
    trains: bool = True
    rolls_out: bool = True
    runs: bool = True
    transposed: bool = True
    split_views: frozenset[str] = frozenset({"gate_up"})

    def rows(self, spec: ModelSpec, fused: str, tp: int, rank: int) -> tuple[Block, ...]:
        """Separate projections: one block a part, on both sides."""
        return stacked(spec, fused, tp, rank)

    def prefix_saved_bytes(self, work: Work) -> int:
        """Saved tensors of one attached prefix."""
        s = work.spec
        tower = work.patches * _block(work) * s.vision.depth if s.vision and work.vision_grad else 0
        return work.prompt_tokens * _layer(work) * s.layers + tower

    def prefix_workspace_bytes(self, work: Work, attached: bool) -> int:
        """Temporaries of one prefix forward."""
        return 2 * (work.prompt_tokens * _layer(work) + work.patches * _block(work))

    def score_workspace_bytes(self, work: Work) -> int:
        """Temporaries of one suffix forward."""
        return work.suffix_tokens * (2 * _layer(work) + 4 * work.spec.vocab * work.itemsize)

    def train_activation_bytes(self, work: Work) -> int:
        """Suffix step, or prefix backward with everything made again."""
        suffix = work.suffix_tokens * (_layer(work) * work.spec.layers + 4 * work.spec.vocab * work.itemsize)
        return suffix + 2 * self.prefix_saved_bytes(work)

    def full_activation_bytes(self, work: Work) -> int:
        """Activations of prompt and response together."""
        return self.prefix_saved_bytes(work) + self.train_activation_bytes(work)


FACTS = HostFacts()
