"""Memory of FSDP whose log-probabilities come from a fused cross-entropy kernel, as in verl beside flash-attn.

    fsdp          logits, FP32 copy, log-softmax, both gradients           16 V a token
    fsdp_fused    logits and, in their place or beside them, the gradient   4 V a token

The kernel reads BF16 logits and keeps one FP32 number a token; an FP32 copy of the logits never exists.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.backends.fsdp.facts import FsdpFacts


@dataclass(frozen=True)
class FusedFsdpFacts(FsdpFacts):
    """FSDP and ZeRO with logits in BF16 alone."""

    name: str = "fsdp_fused"
    logits_forward: int = 2
    logits_backward: int = 2


FACTS = FusedFsdpFacts()
