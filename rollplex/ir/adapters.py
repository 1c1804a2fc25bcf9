"""The matrices that LoRA adds to a model: beside every linear layer [out, in] of its targets A [r, in] and B [out, r].

    layer                          A            B             of a rank: Megatron-Bridge     vLLM
    qkv, gate_up (cut along out)   [r, in]      [out, r]      A [r/t, in]  B [out/t, r]      A whole, B [out/t, r]
    o, down (cut along in)         [r, in]      [out, r]      A [r, in/t]  B [out/t, r]      A [r, in/t], B whole
    experts                        [E, r, in]   [E, out, r]   the same, E/ep of them         the same, all E

Megatron-Bridge gives a fused weight one pair; PEFT and vLLM have one for each of q, k, v, gate, up. Every routed expert
has a pair of its own: vLLM's default, Megatron-Bridge's with share_expert_adapters off. Embeddings and heads have none.
Source: Hu et al. 2021, arXiv 2106.09685; NVIDIA-NeMo/Megatron-Bridge peft/utils.py (ParallelLinearAdapter,
GroupedExpertLinearAdapter), peft/lora.py (LoRAMerge); vLLM lora/layers (base_linear, column_parallel_linear, fused_moe)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from rollplex.ir.spec import Adapters, ModelSpec, Tensor

CLASS_OF = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o", "gate": "gate_up", "up": "gate_up", "down": "down"}
CLASS_OF |= {kind: kind for kind in ("expert_gate_up", "expert_down")}
TARGETS = ("qkv", "o", "gate_up", "down")
TARGET_OF = {name: name.removeprefix("expert_") for name in CLASS_OF.values()}


@lru_cache(maxsize=64)
def adapter_tensors(spec: ModelSpec) -> tuple[Tensor, ...]:
    """A and B of every adapted layer, in the order of the model's own tensors."""
    adapters = spec.adapters
    assert adapters is not None
    groups: dict[tuple[int | None, str], list[Tensor]] = {}
    for tensor in replace(spec, adapters=None).tensors():
        name = CLASS_OF.get(tensor.kind, "") if tensor.part == "language" else ""
        if TARGET_OF.get(name) in adapters.targets:
            groups.setdefault((tensor.layer, name if name in adapters.fused else tensor.kind), []).append(tensor)
    return tuple(t for (_, kind), tensors in groups.items() for t in _pairs(adapters, kind, tensors))


def _pairs(adapters: Adapters, kind: str, tensors: list[Tensor]) -> Iterator[Tensor]:
    """The pair of one weight, or of those that share one; a stack of experts holds gate and up as one tensor."""
    first, rows = tensors[0], sum(t.shape[-2] for t in tensors)
    if kind == "expert_gate_up" and kind not in adapters.fused:
        for part in ("gate", "up"):
            yield from _pair(adapters, first, f"{part}_{kind}", rows // 2)
    else:
        yield from _pair(adapters, first, kind, rows)


def _pair(adapters: Adapters, like: Tensor, kind: str, rows: int) -> Iterator[Tensor]:
    """A and B beside a weight that is cut as `like` is."""
    *experts, _, columns = like.shape
    out, inner = len(experts), len(experts) + 1
    along_in = like.axis == inner
    of_experts = like.kind if experts else ""
    name = f"{like.name.rsplit('.', 2)[0]}.{kind}.lora_"
    a_axis = inner if along_in else out if adapters.split else None
    b_axis = out if adapters.split or not along_in else None
    a, b = (*experts, adapters.rank, columns), (*experts, rows, adapters.rank)
    yield Tensor(f"{name}A", a, "language", of_experts or "lora_a", like.layer, a_axis)
    # Rows of B follow the layer's: those of k and v are repeated where there are more ranks than KV heads.
    yield Tensor(f"{name}B", b, "language", of_experts or (kind if kind in "kv" else "lora_b"), like.layer, b_axis)
