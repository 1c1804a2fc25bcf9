"""Megatron's activation sizes against what torch's own operators save, published formulas, and a reported failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rollplex.backends import activations as a
from rollplex.backends.megatron.facts import FACTS
from rollplex.ir.models import load_model
from rollplex.ir.spec import ModelSpec
from rollplex.ir.work import Work

TOKENS = 64
DENSE, MOE = load_model("Qwen2.5-VL-7B"), load_model("Qwen3-VL-30B-A3B")


def work(spec: ModelSpec, **changes: object) -> Work:
    plain = Work(
        spec=spec,
        tp=1,
        itemsize=2,
        sequence_parallel=True,
        recompute=False,
        prompt_tokens=TOKENS,
        patches=TOKENS,
        responses=1,
        response_tokens=TOKENS,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


# ---- what autograd saves, on the meta device: every storage once, parameters left out


def saved_bytes(layer: Callable[[Tensor], Tensor], width: int) -> int:
    """Bytes that a backward through `layer` needs beside its parameters."""
    x = torch.empty(TOKENS, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if not (t._is_view() and isinstance(t._base, torch.nn.Parameter)) and not isinstance(t, torch.nn.Parameter):
            kept.setdefault(t.untyped_storage()._cdata, t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(x)
    del out
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def weight(rows: int, columns: int) -> Tensor:
    return torch.nn.Parameter(torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"))


def norm(x: Tensor) -> Tensor:
    """A norm that saves its input and two FP32 numbers a token, as fused RMS norms do with one."""
    return F.layer_norm(x, x.shape[-1:], torch.nn.Parameter(torch.empty_like(x[0])))


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [tokens, heads, dim]; the operator that saves q, k, v, its output and the log-sum-exp."""
    rows = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = torch.ops.aten._scaled_dot_product_flash_attention(*rows, 0.0, True)[0]
    return out[0].transpose(0, 1)


def projected(x: Tensor, heads: int, dim: int) -> Tensor:
    return F.linear(x, weight(heads * dim, x.shape[-1])).view(TOKENS, heads, dim)


def swiglu(x: Tensor, ffn: int) -> Tensor:
    gate, up = F.linear(x, weight(ffn, x.shape[-1])), F.linear(x, weight(ffn, x.shape[-1]))
    return F.linear(F.silu(gate) * up, weight(x.shape[-1], ffn))


def attended(s: ModelSpec, x: Tensor) -> Tensor:
    y = norm(x)
    q, k, v = (projected(y, n, s.head_dim) for n in (s.heads, s.kv_heads, s.kv_heads))
    return x + F.linear(flash(q, k, v).reshape(TOKENS, -1), weight(s.hidden, s.heads * s.head_dim))


def test_a_dense_layer_saves_what_torch_saves() -> None:
    """norm | q k v | flash | o | norm | gate up | silu | product | down, on meta tensors of the 7B model's widths."""
    s = DENSE

    def layer(x: Tensor) -> Tensor:
        y = attended(s, x)
        return y + swiglu(norm(y), s.ffn)

    measured = saved_bytes(layer, s.hidden)
    assert measured == pytest.approx(TOKENS * a.layer_bytes(work(s), TOKENS), rel=2e-3)


def test_a_layer_of_experts_saves_what_torch_saves() -> None:
    """norm | router | each token to 8 of 128 experts | their SwiGLU | weighted sum; the router's FP32 logits aside."""
    s, moe = MOE, MOE.moe
    assert moe is not None

    def layer(x: Tensor) -> Tensor:
        y = attended(s, x)
        z = norm(y)
        gates = F.softmax(F.linear(z, weight(moe.experts, s.hidden)), dim=-1, dtype=torch.float32)
        sent = z[:, None].expand(-1, moe.per_token, -1).reshape(-1, s.hidden).clone()
        out = swiglu(sent, moe.ffn) * gates[:, : moe.per_token].reshape(-1, 1).to(z.dtype)
        return y + out.view(TOKENS, moe.per_token, -1).sum(1)

    measured = saved_bytes(layer, s.hidden)
    planned = TOKENS * a.layer_bytes(work(s), TOKENS)
    router_logits = TOKENS * moe.experts * 4
    assert measured == pytest.approx(planned - router_logits, rel=2e-3)


def test_a_vision_block_saves_what_torch_saves() -> None:
    """The same with as many key as query heads: 8 widths and 4 feed-forward widths a patch (log-sum-exp aside)."""
    v = DENSE.vision
    assert v is not None
    head = v.hidden // v.heads

    def block(x: Tensor) -> Tensor:
        y = norm(x)
        q, k, value = (projected(y, v.heads, head) for _ in range(3))
        x = x + F.linear(flash(q, k, value).reshape(TOKENS, -1), weight(v.hidden, v.hidden))
        return x + swiglu(norm(x), v.ffn)

    lse = 4 * v.heads
    assert saved_bytes(block, v.hidden) == pytest.approx(TOKENS * (a.vision_block_bytes(work(DENSE)) + lse), rel=3e-3)


def test_the_ends_of_a_trained_tower_save_what_torch_saves() -> None:
    """patches | linear | rotated by FP32 cosines and sines | norm | four patches a token: linear | GELU | linear."""
    v = DENSE.vision
    assert v is not None
    pixels, head, merged = v.channels * v.temporal_patch * v.patch**2, v.hidden // v.heads, v.hidden * v.merge**2

    def ends(x: Tensor) -> Tensor:
        y = F.linear(x, weight(v.hidden, pixels))
        cos, sin = (torch.empty(TOKENS, 1, head, device="meta") for _ in range(2))
        z = y.view(TOKENS, v.heads, head).float()
        y = y + (z * cos + z.flip(-1) * sin).to(y.dtype).view_as(y)
        y = norm(y).view(TOKENS // v.merge**2, merged)
        return F.linear(F.gelu(F.linear(y, weight(merged, merged))), weight(v.out_hidden, merged))

    plain, trained = work(DENSE), work(DENSE, vision_grad=True)
    blocks = TOKENS * v.depth * a.vision_block_bytes(plain)
    planned = FACTS.prefix_saved_bytes(trained) - FACTS.prefix_saved_bytes(plain) - blocks
    assert saved_bytes(ends, pixels) == pytest.approx(planned, rel=2e-3)


# ---- published formulas: GPT layers with as many KV heads as heads, head_dim = hidden / heads, dropout

GPT = replace(DENSE, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=16384, vision=None)
DROPOUT_MASKS = 2  # bytes of h: after attention and after the feed-forward
SWIGLU_EXTRA = 4  # bytes of F: the gate and its SiLU, which a GELU layer has not


def test_selective_recomputation_is_megatrons_published_formula() -> None:
    """theoretical_memory_usage.py: s b h (18 + 4 F / h) with sequence parallelism and selective recomputation."""
    published = GPT.hidden * (18 + 4 * GPT.ffn / GPT.hidden)
    expected = published - DROPOUT_MASKS * GPT.hidden + SWIGLU_EXTRA * GPT.ffn
    unfused = work(GPT, unfused=True, recompute_attention=True)
    assert a.layer_bytes(unfused, 2048) == expected
    assert a.layer_bytes(replace(unfused, tp=8), 2048) == expected / 8


def test_unfused_attention_adds_the_scores_of_korthikanti() -> None:
    """s b h (34 + 5 a s / h): of the 5, 2 are the softmax, 1 the dropout mask and 2 its output."""
    context = 2048
    published = GPT.hidden * (34 + 5 * GPT.heads * context / GPT.hidden)
    dropout = DROPOUT_MASKS * GPT.hidden + 3 * GPT.heads * context
    assert a.layer_bytes(work(GPT, unfused=True), context) == published - dropout + SWIGLU_EXTRA * GPT.ffn


def test_without_sequence_parallelism_ten_widths_stay_whole() -> None:
    """s b h (10 + 24 / t + ..): less two dropout masks, 8 h bytes do not depend on t."""
    wide, narrow = (a.attention_bytes(work(GPT, sequence_parallel=False, tp=t), 1) for t in (1, 8))
    cut = (wide - narrow) / (1 - 1 / 8)
    assert wide - cut == 8 * GPT.hidden


def test_full_recomputation_keeps_two_bytes_of_hidden() -> None:
    """2 s b h a layer; in the backward one layer is made again."""
    full = work(GPT, recompute=True, prompt_tokens=2, patches=0)
    kept = FACTS.train_activation_bytes(full) - FACTS.train_activation_bytes(replace(full, spec=_deeper(GPT, -1)))
    boundary = full.prompt_tokens * full.kv_bytes // GPT.layers
    assert kept - boundary == full.suffix_tokens * 2 * GPT.hidden


def _deeper(spec: ModelSpec, layers: int) -> ModelSpec:
    return replace(spec, layers=spec.layers + layers)


def test_recomputation_orders_the_sizes() -> None:
    """none > selective > full for unfused attention; with flash attention selective has nothing to make again."""
    plain = work(GPT, unfused=True, responses=4, response_tokens=2048)
    sizes = [
        FACTS.train_activation_bytes(w)
        for w in (plain, replace(plain, recompute_attention=True), replace(plain, recompute=True))
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    fused = replace(plain, unfused=False)
    assert FACTS.train_activation_bytes(fused) == FACTS.train_activation_bytes(replace(fused, recompute_attention=True))


# ---- logits


def test_fp32_logits_are_those_of_a_reported_failure() -> None:
    """slime issue 1767: logits.float() of Qwen3-4B asked for 65,867,350,016 bytes, at TP 2 that is 216.8k tokens."""
    tokens = 65_867_350_016 * 2 / (4 * 151_936)
    assert tokens == pytest.approx(216_800, rel=1e-3)
    fp32 = work(load_model("Qwen3-4B"), tp=2)
    hidden = 4 * fp32.spec.hidden * 2 - 2 * fp32.spec.hidden * 2 // 2
    one_copy = (a.head_bytes(fp32) - hidden) * 4 / (a.LOGIT_COPIES * 2 + a.LOGIT_FP32_COPIES * 4)
    assert one_copy * tokens == pytest.approx(65_867_350_016, rel=1e-3)


# ---- pipeline and context parallelism


def test_the_first_stage_keeps_a_step_in_flight_for_every_stage() -> None:
    """1F1B: 4 stages of a quarter of the layers and 4 steps each: what one stage of all layers keeps of one step."""
    one = work(GPT, response_tokens=4096, patches=0, steps=8)
    four = replace(one, pp=4)
    head = min(4096, 2048) * a.head_bytes(one)
    sent = 2 * 4096 * a.layer_input_bytes(four)
    boundary = TOKENS * one.kv_bytes
    assert FACTS.train_activation_bytes(four) - sent - boundary // 4 == FACTS.train_activation_bytes(one) - boundary
    flying = 3 * GPT.ffn * 2  # SwiGLU's backward: gradients of the product, of gate and of up
    saved = GPT.layers * a.layer_bytes(one, 4096 + TOKENS)
    assert FACTS.train_activation_bytes(one) - boundary == 4096 * (saved + flying) + head
    assert replace(four, steps=2).layers_in_flight == 2 * GPT.layers // 4


def test_context_parallelism_cuts_the_tokens() -> None:
    """A quarter of the tokens a rank, two pieces of an eighth: 4100 become 8 x 513."""
    assert work(GPT, cp=4).local(4096) == 1024
    assert work(GPT, cp=4).local(4100) == 2 * 513
    whole, quarter = (FACTS.prefix_saved_bytes(work(GPT, prompt_tokens=4096, patches=0, cp=cp)) for cp in (1, 4))
    assert whole == 4 * quarter
