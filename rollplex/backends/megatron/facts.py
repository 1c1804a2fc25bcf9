"""Memory and weight order of Megatron-Core, per GPU; what a token takes is in `activations`.

A plan holds for every pipeline stage: an object has the size of the stage with most of it. Stage 0 has the tower and
holds as many suffix steps in flight as there are stages, the next one less (1F1B); the last has the head.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.backends import activations as a
from rollplex.backends.attention_sums import backward_sums_bytes
from rollplex.backends.facts import Block
from rollplex.backends.megatron import sizes
from rollplex.backends.ordering import grouped
from rollplex.backends.row_bytes import odd_mlp_bytes
from rollplex.ir.models import ModelSpec
from rollplex.ir.serving import Serving
from rollplex.ir.spec import VisionSpec
from rollplex.ir.work import Work

HEAD_CHUNK_TOKENS = 2048
"""The head runs over this many tokens at a time outside the naive schedule."""


def _tower_forward(work: Work) -> int:
    """Live temporaries of the tower: its pixels; gate, up and both together, beside hidden states and their norm.

    Of a GPU's products of odd rows gate and up are one, and the product is there once more, with zeros behind.
    """
    v = work.spec.vision
    if v is None:
        return 0
    pixels = v.channels * v.temporal_patch * v.patch**2
    weights = odd_mlp_bytes(v.hidden, v.ffn, work.itemsize)
    return work.patches * (pixels + 5 * v.hidden + 4 * v.ffn) * work.itemsize + weights


def _tower_backward(work: Work, v: VisionSpec) -> int:
    """A block's, and of odd rows the product's gradient once more, copies of the weights and of their gradients."""
    block, weights = (
        a.vision_block_bytes(work) + 2 * a.vision_input_bytes(work),
        2 * odd_mlp_bytes(v.hidden, v.ffn, work.itemsize),
    )
    odd = v.ffn * work.itemsize if weights else 0
    return work.patches * (block + _gated_backward(work, v.ffn) + odd) + weights


def _gated_backward(work: Work, ffn: int) -> int:
    """Gradients in flight in the backward of an MLP of this width: of its product, of gate and of up; none of MoE."""
    return 3 * ffn * work.itemsize if work.spec.moe is None else 0


def _ends(work: Work, v: VisionSpec) -> int:
    """What the tower saves of a patch beside its blocks: its pixels, angles, the projector's norm and two linears."""
    pixels = v.channels * v.temporal_patch * v.patch**2
    return (pixels + 4 * v.hidden) * work.itemsize + 4 + 8 * (v.hidden // v.heads)


@dataclass(frozen=True)
class MegatronFacts:
    """Megatron-Core 0.16 and later, local layer spec, dropout 0."""

    name: str = "megatron"
    trains: bool = True
    rolls_out: bool = False
    runs: bool = True
    on_cpu: bool = True
    families: frozenset[str] = frozenset({"qwen2_5_vl"})
    whole_sequences: bool = False
    overlaps_update: bool = True
    transposed: frozenset[str] = frozenset({"o", "down", "expert_down"})
    split_views: frozenset[str] = frozenset({"gate_up", "expert_gate_up"})
    fuses: frozenset[str] = frozenset({"qkv", "gate_up", "expert_gate_up"})
    reindexes: frozenset[str] = frozenset()
    adapter_ranks: tuple[int, ...] = ()

    def profile_bytes(self, serving: Serving) -> int:
        """No profile run: its memory is a setting of the job."""
        raise AssertionError("not an engine with a share of the memory")

    def rows(self, spec: ModelSpec, fused: str, tp: int, rank: int) -> tuple[Block, ...]:
        """Per KV group `[q.., k, v]`; `[gate_r; up_r]`."""
        return grouped(spec, fused, tp, rank)

    def prefix_saved_bytes(self, work: Work) -> int:
        """Layer inputs under recomputation, everything otherwise; the tower only where it is trained."""
        if work.on_cpu:
            return sizes.prefix_saved_bytes(work)
        s, tokens = work.spec, work.prefix_tokens
        layers = self._kept(work, work.context, work.layers) + self._last(work)
        block = a.vision_input_bytes(work) if work.recompute else a.vision_block_bytes(work)
        tower = work.patches * (block * s.vision.depth + _ends(work, s.vision)) if s.vision and work.vision_grad else 0
        return tokens * layers + tower

    def _last(self, work: Work) -> int:
        """Beside what a checkpoint keeps of it: of the last layer only keys and values are made, outside of one.

        Its norm's input and output, what its projection reads, cosines and sines; and the angles that all layers share.
        """
        s, angles = work.spec, 4 * work.spec.head_dim
        if not work.recompute:
            return angles
        heads = s.heads * s.head_dim // work.tp + 4 * s.head_dim
        return 2 * a.layer_input_bytes(work) + heads * work.itemsize + 8 + angles

    def prefix_workspace_bytes(self, work: Work, attached: bool) -> int:
        """One layer's forward, or the tower's; an attached prefix also stages two layer inputs for the link."""
        if work.on_cpu:
            return sizes.prefix_workspace_bytes(work, attached)
        tokens, context = work.prefix_tokens, work.context
        staging = 2 * tokens * a.layer_input_bytes(work) if attached else 0
        full = tokens * a.layer_bytes(work, context) if attached and not work.recompute else 0
        forward = max(tokens * a.layer_forward_bytes(work, context), _tower_forward(work))
        return forward + staging + full + self._sent(work, tokens)

    def score_workspace_bytes(self, work: Work) -> int:
        """One layer's forward over the suffix, and the head in pieces."""
        if work.on_cpu:
            return sizes.score_workspace_bytes(work)
        tokens = self._suffix_tokens(work)
        layer = a.layer_forward_bytes(work, work.context + work.response_tokens)
        return tokens * layer + self._head(work, tokens) + self._sent(work, tokens)

    def train_activation_bytes(self, work: Work) -> int:
        """The larger of a suffix step and a prefix backward, with the boundary's gradient of one group."""
        if work.on_cpu:
            return sizes.train_activation_bytes(work)
        boundary = (work.prefix_tokens + work.others) * work.kv_bytes
        return max(self._suffix_step(work), self._prefix_backward(work)) + boundary

    def _suffix_step(self, work: Work) -> int:
        """Of the stage that keeps most layers of steps in flight, with the head of the last."""
        tokens, context = self._suffix_tokens(work), work.context + work.response_tokens
        layer = a.backward_bytes(work, context) + _gated_backward(work, work.spec.ffn // work.tp)
        step = tokens * (self._kept(work, context, work.layers_in_flight) + layer)
        apart = backward_sums_bytes(work, work.local(work.response_tokens), work.context, work.responses)
        return step + max(self._head(work, tokens), apart) + self._sent(work, tokens)

    def _kept(self, work: Work, context: int, layers: int) -> int:
        """What layers keep of a token: their inputs under recomputation, everything otherwise."""
        return layers * a.layer_input_bytes(work) if work.recompute else a.layers_bytes(work, context, layers)

    def _prefix_backward(self, work: Work) -> int:
        v, tokens, context = work.spec.vision, work.prefix_tokens, work.context
        vision = _tower_backward(work, v) if v and work.vision_grad else 0
        layer = a.layer_bytes(work, context) + 2 * a.layer_input_bytes(work) + 2 * a.scores_bytes(work, context)
        layer += _gated_backward(work, work.spec.ffn // work.tp)
        apart = backward_sums_bytes(work, tokens, context)
        again = self.prefix_saved_bytes(work) if work.dropped else 0
        return again + max(tokens * layer + apart + self._sent(work, tokens), vision)

    def _suffix_tokens(self, work: Work) -> int:
        return work.responses * work.local(work.response_tokens)

    def _head(self, work: Work, tokens: int) -> int:
        return min(tokens, HEAD_CHUNK_TOKENS) * a.head_bytes(work)

    def _sent(self, work: Work, tokens: int) -> int:
        """Hidden states that a pipeline stage receives and sends."""
        return 2 * tokens * a.layer_input_bytes(work) if work.pp > 1 else 0

    def full_activation_bytes(self, work: Work) -> int:
        """One sequence of prompt and response, every layer and the whole head saved."""
        tokens = work.local(work.prompt_tokens + work.response_tokens)
        layers = a.layers_bytes(work, work.prompt_tokens + work.response_tokens, work.layers_in_flight)
        return tokens * (layers + a.head_bytes(work))


FACTS = MegatronFacts()
