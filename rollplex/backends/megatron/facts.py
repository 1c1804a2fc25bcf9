"""Memory and weight order of Megatron-Core with flash attention, per GPU.

Saved for backward, bytes a token and layer (h hidden, F ffn, i bytes an element; the first line is not split over
tensor-parallel ranks unless sequence parallelism is on):

    norm1 in, norm1 out, norm2 in, norm2 out                             4 h i
    q, k, v, attention out, log-sum-exp                                  (2 nq + 2 nkv) d i + 4 nq
    gate, up, silu(gate), product (unfused SwiGLU)                       4 F i

The head holds logits in bf16, their fp32 copy, softmax, the entropy's softmax, and both gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.backends.facts import Block, Work
from rollplex.backends.ordering import grouped
from rollplex.ir.models import ModelSpec

HEAD_CHUNK_TOKENS = 2048
"""The head runs over this many tokens at a time outside the naive schedule."""


def _split(nbytes: int, work: Work, sharded: bool) -> int:
    return nbytes // work.tp if sharded else nbytes


def layer_bytes(work: Work) -> int:
    """Everything one language layer saves for backward, a token."""
    s, i = work.spec, work.itemsize
    hidden = _split(4 * s.hidden * i, work, work.sequence_parallel)
    attention = (2 * s.heads + 2 * s.kv_heads) * s.head_dim * i + 4 * s.heads
    return hidden + (attention + 4 * s.ffn * i) // work.tp


def layer_input_bytes(work: Work) -> int:
    """What a checkpointed language layer keeps, a token: its input."""
    return _split(work.spec.hidden * work.itemsize, work, work.sequence_parallel)


def layer_forward_bytes(work: Work) -> int:
    """Live temporaries of one language layer's forward without gradients, a token."""
    s, i = work.spec, work.itemsize
    hidden = 2 * s.hidden * i + _split(2 * s.hidden * i, work, work.sequence_parallel)
    widest = max((2 * s.heads + 2 * s.kv_heads) * s.head_dim, 3 * s.ffn) * i // work.tp
    return hidden + widest


def head_bytes(work: Work) -> int:
    """Logits and their copies, a token, with the gathered hidden state and its gradient."""
    s, i = work.spec, work.itemsize
    logits = s.vocab * (2 * i + 4 * 4) // work.tp
    return logits + 2 * s.hidden * i + _split(2 * s.hidden * i, work, work.sequence_parallel)


def vision_block_bytes(work: Work) -> int:
    """Everything one vision block saves for backward, a patch; the tower is replicated over ranks."""
    vision = work.spec.vision
    return (8 * vision.hidden + 4 * vision.ffn) * work.itemsize if vision else 0


def vision_input_bytes(work: Work) -> int:
    """What a checkpointed vision block keeps, a patch."""
    return work.spec.vision.hidden * work.itemsize if work.spec.vision else 0


def vision_forward_bytes(work: Work) -> int:
    """Live temporaries of the tower's forward without gradients."""
    vision = work.spec.vision
    return work.patches * (5 * vision.hidden + 3 * vision.ffn) * work.itemsize if vision else 0


@dataclass(frozen=True)
class MegatronFacts:
    """Megatron-Core 0.16 and later, local layer spec, dropout 0."""

    name: str = "megatron"
    trains: bool = True
    rolls_out: bool = False
    runs: bool = False
    overlaps_update: bool = True
    transposed: bool = True
    split_views: frozenset[str] = frozenset({"gate_up"})

    def rows(self, spec: ModelSpec, fused: str, tp: int, rank: int) -> tuple[Block, ...]:
        """Per KV group `[q.., k, v]`; `[gate_r; up_r]`."""
        return grouped(spec, fused, tp, rank)

    def prefix_saved_bytes(self, work: Work) -> int:
        """Layer inputs under recomputation, everything otherwise; the tower only where it is trained."""
        s = work.spec
        layer = layer_input_bytes(work) if work.recompute else layer_bytes(work)
        block = vision_input_bytes(work) if work.recompute else vision_block_bytes(work)
        tower = work.patches * block * s.vision.depth if s.vision and work.vision_grad else 0
        return work.prompt_tokens * layer * s.layers + tower

    def prefix_workspace_bytes(self, work: Work, attached: bool) -> int:
        """One layer's forward, or the tower's; an attached prefix also stages two layer inputs for the link."""
        staging = 2 * work.prompt_tokens * layer_input_bytes(work) if attached else 0
        full = work.prompt_tokens * layer_bytes(work) if attached and not work.recompute else 0
        return max(work.prompt_tokens * layer_forward_bytes(work), vision_forward_bytes(work)) + staging + full

    def score_workspace_bytes(self, work: Work) -> int:
        """One layer's forward over the suffix, and the head in pieces."""
        tokens = work.suffix_tokens
        return tokens * layer_forward_bytes(work) + min(tokens, HEAD_CHUNK_TOKENS) * head_bytes(work)

    def train_activation_bytes(self, work: Work) -> int:
        """The larger of a suffix step and a prefix backward, with the boundary's gradient of one group."""
        s = work.spec
        boundary = work.prompt_tokens * s.kv_bytes_per_token(work.tp, work.itemsize)
        return max(self._suffix_step(work), self._prefix_backward(work)) + boundary

    def _suffix_step(self, work: Work) -> int:
        tokens, layers = work.suffix_tokens, work.spec.layers
        head = min(tokens, HEAD_CHUNK_TOKENS) * head_bytes(work)
        if work.recompute:
            return tokens * (layers * layer_input_bytes(work) + layer_bytes(work)) + head
        return tokens * layers * layer_bytes(work) + head

    def _prefix_backward(self, work: Work) -> int:
        vision = work.patches * (vision_block_bytes(work) + 2 * vision_input_bytes(work)) if work.vision_grad else 0
        return max(work.prompt_tokens * (layer_bytes(work) + 2 * layer_input_bytes(work)), vision)

    def full_activation_bytes(self, work: Work) -> int:
        """One sequence of prompt and response, every layer and the whole head saved."""
        tokens = work.prompt_tokens + work.response_tokens
        return tokens * (work.spec.layers * layer_bytes(work) + head_bytes(work))


FACTS = MegatronFacts()
