"""What a language layer, a vision block and the head keep and allocate, a token, on one rank: Megatron-Core's modules.

Saved for backward (h hidden, F ffn, i bytes an element, t tensor parallel; the first line is cut only by sequence
parallelism), without dropout:

    norm1 in, norm1 out, norm2 in, norm2 out                             4 h i
    q, k, v, attention out; log-sum-exp (flash)                          ((2 nq + 2 nkv) d i + 4 nq) / t
      or, unfused, the softmax over a context of s tokens                  nq s i / t instead of the log-sum-exp
    gate, up, silu(gate), product (unfused SwiGLU)                       4 F i / t
    or, with k experts of F a token: router logits and probabilities     8 E
      dispatched tokens, expert outputs (gathered over t)                  2 k h i
      gate, up, silu(gate), product of k experts                           4 k F i / t

Korthikanti et al. 2022 (arXiv 2205.05198) count the same for a GPT layer with dropout: s b h (34 + 5 a s / h), of which
2 h and 3 a s are dropout's; Megatron-LM's theoretical_memory_usage.py writes 18 + 4 F / h where sequence parallelism
and selective recomputation are on. The head holds logits in bf16, their fp32 copy, softmax, the entropy's softmax, and
both gradients. Experts are taken as evenly loaded: each rank works on as many tokens as it sends out.

With LoRA of rank r every pair adds what A gives, r i, which no rank cuts: B is cut along its rows. What A reads
are the inputs of the layers, in the lines above: where sequence parallelism cuts them they are gathered again in the
backward, as Megatron-Bridge does under sequence_parallel_input_regather.
"""

from __future__ import annotations

from rollplex.ir.adapters import TARGET_OF
from rollplex.ir.work import Work

PARTS = {"qkv": 3, "gate_up": 2, "expert_gate_up": 2}  # that have a pair each where the engine does not fuse them
ROUTER_BYTES = 8  # an expert: its logit and its probability, both FP32
LOGIT_COPIES, LOGIT_FP32_COPIES = 2, 4  # logits and their gradient; their FP32 copy, two softmaxes, its gradient


def _split(nbytes: int, work: Work, sharded: bool) -> int:
    return nbytes // work.tp if sharded else nbytes


def _hidden(work: Work, copies: int) -> int:
    return _split(copies * work.spec.hidden * work.itemsize, work, work.sequence_parallel)


def attention_bytes(work: Work, context: int) -> int:
    """Saved by attention and the norms around it; `context` is what a token's query can see."""
    s, i = work.spec, work.itemsize
    qkv = (2 * s.heads + 2 * s.kv_heads) * s.head_dim * i
    return _hidden(work, 4) + qkv // work.tp + saved_scores_bytes(work, context) + adapter_bytes(work, "qkv", "o")


def saved_scores_bytes(work: Work, context: int) -> int:
    """The softmax of unfused attention unless it is made again, the log-sum-exp of flash attention."""
    if not work.unfused:
        return 4 * work.spec.heads // work.tp
    return 0 if work.recompute_attention else scores_bytes(work, context)


def scores_bytes(work: Work, context: int) -> int:
    """One score of every head for every token of the context."""
    return work.spec.heads * context * work.itemsize // work.tp if work.unfused else 0


def dense_bytes(work: Work) -> int:
    """Saved by a dense feed-forward."""
    return 4 * work.spec.ffn * work.itemsize // work.tp + adapter_bytes(work, "gate_up", "down")


def moe_bytes(work: Work) -> int:
    """Saved by routed experts: the router, what is dispatched and returned, and the experts' own."""
    moe, i = work.spec.moe, work.itemsize
    if moe is None:
        return 0
    experts = moe.per_token * (2 * work.spec.hidden + 4 * moe.ffn // work.tp) * i
    adapters = moe.per_token * adapter_bytes(work, "expert_gate_up", "expert_down")
    return ROUTER_BYTES * moe.experts + experts + adapters


def adapter_bytes(work: Work, *names: str) -> int:
    """What the matrices A beside these classes of weights give, a token; none without LoRA."""
    adapters = work.adapters
    if adapters is None:
        return 0
    pairs = sum(1 if n in adapters.fused else PARTS.get(n, 1) for n in names if TARGET_OF[n] in adapters.targets)
    return pairs * adapters.rank * work.itemsize


def layer_bytes(work: Work, context: int) -> int:
    """Everything the layer with the largest state saves for backward, a token."""
    dense = dense_bytes(work) if _has_dense(work) else 0
    return attention_bytes(work, context) + max(dense, moe_bytes(work))


def layers_bytes(work: Work, context: int, layers: int) -> int:
    """Everything this many layers of a stage save for backward, a token."""
    routed = 0 if work.spec.moe is None else layers - _dense_layers(work)
    plain = layers - routed
    return layers * attention_bytes(work, context) + plain * dense_bytes(work) + routed * moe_bytes(work)


def _dense_layers(work: Work) -> int:
    """Dense layers that the stage with the fewest routed ones may have; none where every layer is routed."""
    moe = work.spec.moe
    return 0 if moe is None else len(moe.dense_layers) if work.pp == 1 else 0


def _has_dense(work: Work) -> bool:
    return work.spec.moe is None or bool(work.spec.moe.dense_layers)


def layer_input_bytes(work: Work) -> int:
    """What a checkpointed language layer keeps, a token: its input."""
    return _hidden(work, 1)


def layer_forward_bytes(work: Work, context: int) -> int:
    """Live temporaries of one language layer's forward without gradients, a token.

    Unfused attention holds scores and softmax; context parallelism receives the next rank's keys and values.
    """
    s, i = work.spec, work.itemsize
    hidden = 2 * s.hidden * i + _hidden(work, 2)
    attention = (2 * s.heads + 2 * s.kv_heads) * s.head_dim * i // work.tp + 2 * scores_bytes(work, context)
    ring = 2 * 2 * s.kv_heads_per_rank(work.tp) * s.head_dim * i if work.cp > 1 else 0
    return hidden + max(attention + ring, 3 * s.ffn * i // work.tp if _has_dense(work) else 0, moe_bytes(work))


def backward_bytes(work: Work, context: int) -> int:
    """What one layer's backward makes again, and the gradients of scores and softmax in flight, a token."""
    again = layer_bytes(work, context) if work.recompute else 0
    return again + 2 * scores_bytes(work, context)


def head_bytes(work: Work) -> int:
    """Logits and their copies, a token, with the gathered hidden state and its gradient."""
    s, i = work.spec, work.itemsize
    logits = s.outputs * (LOGIT_COPIES * i + LOGIT_FP32_COPIES * 4) // work.tp
    return logits + 2 * s.hidden * i + _hidden(work, 2)


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
