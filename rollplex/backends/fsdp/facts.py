"""Memory of a trainer built on torch FSDP or DeepSpeed ZeRO over Hugging Face modules, as verl and TRL run it.

    zero 0, 1, 2   BF16 weights whole on every rank; FP32 masters beside them (1, 2: cut), gradients FP32 (2: cut)
    zero 3         FP32 parameters cut over all ranks (they are the masters), gathered in BF16 unit by unit

It runs whole sequences, `microbatch` at a time: every response is run with its prompt before it, nothing of a prompt is
shared. A layer of transformers saves more than Megatron's: its RMS norms keep an FP32 copy of the input and the
normalised value, 8 h bytes a token. Logits cover prompt and response:

    logits, their FP32 copy, log-softmax, both gradients           (2 + 4 + 4 + 4 + 2) V a token

`context_parallel` deals out a microbatch's tokens (`ulysses`): a rank has its share of hidden states and logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.backends import activations as a
from rollplex.backends.facts import Block
from rollplex.backends.fsdp import ulysses
from rollplex.backends.ordering import stacked
from rollplex.ir.models import ModelSpec
from rollplex.ir.serving import Serving
from rollplex.ir.work import Work

NORM_COPIES = 8  # bytes of h a token beyond a fused norm's: FP32 input and normalised value of two norms
BUCKET_ELEMENTS = 5 * 10**8
"""DeepSpeed's default reduce_bucket_size: gradients in flight where weights are whole."""


def layer_bytes(work: Work, context: int) -> int:
    """Everything one language layer of transformers saves for backward, a token."""
    return a.layer_bytes(work, context) + NORM_COPIES * work.spec.hidden + ulysses.saved_bytes(work)


def layer_parameters(spec: ModelSpec) -> int:
    """Parameters of the FSDP unit of one language layer: the largest layer."""
    sizes = [0] * spec.layers
    for tensor in spec.tensors():
        if tensor.part == "language" and tensor.layer is not None:
            sizes[tensor.layer] += tensor.numel
    return max(sizes)


def root_parameters(spec: ModelSpec) -> int:
    """Parameters of the root unit: embedding, head, final norm; gathered as long as a pass runs."""
    return sum(t.numel for t in spec.tensors() if t.part == "language" and t.layer is None)


def gathered_bytes(work: Work) -> int:
    """The root unit, the running layer and the one that is prefetched."""
    return (root_parameters(work.spec) + 2 * layer_parameters(work.spec)) * work.itemsize if work.zero == 3 else 0


def backward_peak_bytes(work: Work, kept: int, head: int, layer: int) -> int:
    """The fullest instant of backward: at the logits, in a layer, or when the root's gradient is reduced.

    A unit's gradient is whole as it was computed, and once more cast to FP32 while it is reduced; then it is cut. The
    head's comes first and waits for the embedding's, the last, when nothing is kept of the layers any more. Under LoRA
    there are gradients of adapters alone: those of one unit are small beside a layer's activations, and not counted.
    """
    if work.adapters is not None:
        return kept + max(head, layer) + gathered_bytes(work)
    if work.zero < 3:
        return kept + max(head, layer) + (BUCKET_ELEMENTS * work.itemsize if work.zero else 0)
    reduced = work.itemsize + 4
    waits = work.spec.outputs * work.spec.hidden * work.itemsize
    begin, middle = kept + head + waits, kept + layer + waits + layer_parameters(work.spec) * reduced
    return max(begin, middle, root_parameters(work.spec) * reduced) + gathered_bytes(work)


@dataclass(frozen=True)
class FsdpFacts:
    """torch FSDP (full shard is zero 3) and ZeRO-1/2, AdamW on resident state."""

    name: str = "fsdp"
    trains: bool = True
    rolls_out: bool = False
    runs: bool = False
    on_cpu: bool = False
    whole_sequences: bool = True
    overlaps_update: bool = False
    transposed: frozenset[str] = frozenset()
    split_views: frozenset[str] = frozenset()
    fuses: frozenset[str] = frozenset({"expert_gate_up"})
    reindexes: frozenset[str] = frozenset()
    adapter_ranks: tuple[int, ...] = ()
    logits_forward: int = 2 + 4 + 4
    """Bytes of a logit and of the copies made of it until there is a log-probability."""
    logits_backward: int = 4 + 2

    def profile_bytes(self, serving: Serving) -> int:
        """No profile run: its memory is a setting of the job."""
        raise AssertionError("not an engine with a share of the memory")

    def rows(self, spec: ModelSpec, fused: str, tp: int, rank: int) -> tuple[Block, ...]:
        """Separate projections, as transformers names them."""
        return stacked(spec, fused, tp, rank)

    def prefix_saved_bytes(self, work: Work) -> int:
        """Nothing is kept of a prompt: it is run again with every response."""
        return 0

    def prefix_workspace_bytes(self, work: Work, attached: bool) -> int:
        """A prompt's forward on its way through a whole sequence."""
        return a.vision_forward_bytes(work)

    def score_workspace_bytes(self, work: Work) -> int:
        """One layer's forward and the logits of `work.responses` whole sequences, with the gathered units."""
        tokens, context = self._tokens(work), work.response_tokens
        layer = ulysses.layer_forward_bytes(work, context) + NORM_COPIES * work.spec.hidden
        tower = work.responses * a.vision_forward_bytes(work)
        head = self.logits_forward * work.spec.outputs + 2 * work.spec.hidden * work.itemsize
        return max(tokens * max(layer, head), tower) + gathered_bytes(work)

    def train_activation_bytes(self, work: Work) -> int:
        """Everything kept of a microbatch, and the logits or one layer's backward, with the gathered units."""
        tokens, context = self._tokens(work), work.response_tokens
        layer = a.layer_input_bytes(work) if work.recompute else layer_bytes(work, context)
        again = layer_bytes(work, context) if work.recompute else 2 * a.scores_bytes(work, context)
        head = (self.logits_forward + self.logits_backward) * work.spec.outputs + 4 * work.spec.hidden * work.itemsize
        return self._tower(work) + backward_peak_bytes(
            work, tokens * work.layers * layer, tokens * head, tokens * again
        )

    def _tower(self, work: Work) -> int:
        """The towers of all sequences: a frozen one's forward, a trained one's state."""
        vision, patches = work.spec.vision, work.responses * work.patches
        if vision is None or not work.vision_grad:
            return work.responses * a.vision_forward_bytes(work)
        block = a.vision_block_bytes(work) + NORM_COPIES * vision.hidden
        return patches * (vision.depth * a.vision_input_bytes(work) + block if work.recompute else vision.depth * block)

    def _tokens(self, work: Work) -> int:
        return work.local(work.responses * work.response_tokens)

    def full_activation_bytes(self, work: Work) -> int:
        """One sequence of prompt and response."""
        return self.train_activation_bytes(work)


FACTS = FsdpFacts()
