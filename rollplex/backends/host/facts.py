"""The host engine for the compiler: Hugging Face's weight order on both sides, and the sizes of its work.

Elements that transformers' modules save for backward (h hidden, F ffn, q and k query and key rows):

    language layer, a token   7 h (two norms: input, normalised, scaled; attention's output)   2 q + 2 k   4 F   heads
    vision block, a patch     11 h (as above, and q, k, v, output of the windows)              4 F   heads
    last language layer       its keys and values are all a prefix needs: 3 h
    recompute: full           the input of every layer and block instead
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.backends.facts import Block, Work
from rollplex.backends.ordering import stacked
from rollplex.ir.models import ModelSpec

SLACK = 1.05
"""Slots of the pool begin at multiples of 64 bytes, and index tensors are saved beside the activations."""
LOGIT_COPIES = 4
"""Logits, log-probabilities, and the gradients of both."""


def _layer(work: Work) -> int:
    """Bytes one language layer saves, a token."""
    s = work.spec
    elements = 7 * s.hidden + (2 * s.heads + 2 * s.kv_heads) * s.head_dim + 4 * s.ffn + s.heads + 2
    return elements * work.itemsize


def _block(work: Work) -> int:
    """Bytes one vision block saves, a patch."""
    v = work.spec.vision
    return (11 * v.hidden + 4 * v.ffn + v.heads + 6) * work.itemsize if v else 0


def _prefix_elements(work: Work) -> tuple[int, int]:
    """What a prefix saves: bytes a token of the language model, bytes a patch of tower and projector."""
    s, v, i = work.spec, work.spec.vision, work.itemsize
    if work.recompute:
        language = ((s.layers + 3) * s.hidden + 2 * s.head_dim + 2) * i
        return language, ((v.depth + 6) * v.hidden + 6) * i if v else 0
    language = (s.layers - 1) * _layer(work) + (3 * s.hidden + 2 * s.head_dim + 2) * i
    return language, v.depth * _block(work) + 7 * v.hidden * i if v else 0


def _largest_weight(work: Work) -> int:
    return max(t.numel for t in work.spec.tensors()) * work.itemsize


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
        """Saved tensors of one attached prefix; the tower's only where it is trained."""
        token, patch = _prefix_elements(work)
        tower = work.patches * patch if work.vision_grad else 0
        return int((work.prompt_tokens * token + tower) * SLACK)

    def prefix_workspace_bytes(self, work: Work, attached: bool) -> int:
        """Temporaries of one prefix forward: two layers' worth, and what the tower hands over."""
        return 2 * (work.prompt_tokens * _layer(work) + work.patches * _block(work))

    def score_workspace_bytes(self, work: Work) -> int:
        """Temporaries of one suffix forward, and the logits of the response positions."""
        return work.suffix_tokens * (2 * _layer(work) + LOGIT_COPIES * work.spec.vocab * work.itemsize)

    def train_activation_bytes(self, work: Work) -> int:
        """The suffix step's saved state and logits, then the prefix's made again; gradients of KV and of a weight."""
        suffix = work.suffix_tokens * _layer(work) * work.spec.layers
        logits = work.suffix_tokens * LOGIT_COPIES * work.spec.vocab * work.itemsize
        boundary = work.prompt_tokens * work.spec.kv_bytes_per_token(work.tp, work.itemsize)
        whole = _as_if_kept(work)
        return int((suffix + logits + whole) * SLACK) + 2 * boundary + 2 * _largest_weight(work)

    def full_activation_bytes(self, work: Work) -> int:
        """Activations of prompt and response together."""
        tokens = work.prompt_tokens + work.response_tokens
        language = tokens * (work.spec.layers * _layer(work) + LOGIT_COPIES * work.spec.vocab * work.itemsize)
        tower = work.patches * _block(work) * work.spec.vision.depth if work.spec.vision and work.vision_grad else 0
        return int((language + tower) * SLACK)


def _as_if_kept(work: Work) -> int:
    """Bytes of one prefix's saved state without recomputation."""
    vision = work.spec.vision
    token = (work.spec.layers - 1) * _layer(work) + 3 * work.spec.hidden * work.itemsize
    tower = work.patches * vision.depth * _block(work) if vision and work.vision_grad else 0
    return work.prompt_tokens * token + tower


FACTS = HostFacts()
