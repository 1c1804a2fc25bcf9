"""Packed attention on a GPU against attention written out in float64, forward and backward; memory without padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

LENGTHS = [1, 130, 37, 256]
PREFIX = 300


def written_out(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], shared: tuple[Tensor, Tensor], causal: bool
) -> Tensor:
    """[t, heads, d] of float64 tensors, sequence by sequence, every score there."""
    groups, outs = q.shape[1] // k.shape[1], []
    prefix_k, prefix_v = shared
    for own_q, own_k, own_v in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        keys = torch.cat([prefix_k.transpose(0, 1), own_k]).repeat_interleave(groups, 1)
        values = torch.cat([prefix_v.transpose(0, 1), own_v]).repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", own_q, keys) * q.shape[2] ** -0.5
        if causal:
            n, p = len(own_q), prefix_k.shape[1]
            hidden = torch.ones(n, p + n, dtype=torch.bool, device=q.device).tril(p).logical_not()
            scores = scores.masked_fill(hidden, float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(outs)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16().requires_grad_()


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(16, 2, 128), (28, 4, 128), (8, 8, 64)])
def test_responses_after_one_prefix(heads: int, kv_heads: int, d: int) -> None:
    from rollplex.backends.cuda.attention import Lengths, packed_after_prefix

    torch.manual_seed(0)
    t = sum(LENGTHS)
    given = [drawn(t, heads, d), drawn(t, kv_heads, d), drawn(t, kv_heads, d)]
    given += [drawn(kv_heads, PREFIX, d), drawn(kv_heads, PREFIX, d)]
    exact = [x.detach().double().requires_grad_() for x in given]
    lengths = Lengths.of(LENGTHS, torch.device("cuda"))
    q, k, v, prefix_k, prefix_v = given
    out = packed_after_prefix(q, k, v, lengths, prefix_k, prefix_v, d**-0.5)
    q, k, v, prefix_k, prefix_v = exact
    wanted = written_out(q, k, v, LENGTHS, (prefix_k, prefix_v), causal=True)
    weight = torch.randn_like(wanted)
    out.backward(weight.bfloat16())
    wanted.backward(weight)
    assert off(out, wanted) < 0.006
    for found, right in zip(given, exact, strict=True):
        assert found.grad is not None
        assert right.grad is not None
        assert off(found.grad, right.grad) < 0.012


@pytest.mark.parametrize("causal", [True, False])
def test_sequences_that_see_themselves(causal: bool) -> None:
    from rollplex.backends.cuda.attention import Lengths, packed

    torch.manual_seed(1)
    windows = [64] * 6 + [48, 16, 36]
    given = [drawn(sum(windows), 16, 80) for _ in range(3)]  # the tower's head size
    exact = [x.detach().double().requires_grad_() for x in given]
    none = torch.empty(16, 0, 80, device="cuda", dtype=torch.float64)
    q, k, v = given
    out = packed(q, k, v, Lengths.of(windows, torch.device("cuda")), 80**-0.5, causal)
    q, k, v = exact
    wanted = written_out(q, k, v, windows, (none, none), causal)
    weight = torch.randn_like(wanted)
    out.backward(weight.bfloat16())
    wanted.backward(weight)
    assert off(out, wanted) < 0.006
    for found, right in zip(given, exact, strict=True):
        assert found.grad is not None
        assert right.grad is not None
        assert off(found.grad, right.grad) < 0.012


def test_a_megatron_layer_sees_on_a_gpu_what_it_sees_on_a_host() -> None:
    """The prefix's causal attention and the suffix over it, in bfloat16 on both."""
    from rollplex.backends.megatron.attention import ReadPrefix
    from rollplex.backends.training.attention import causal

    torch.manual_seed(2)
    rows = [torch.randn(1, heads, sum(LENGTHS), 64).bfloat16() for heads in (8, 2, 2)]
    kv = torch.randn(1, 2, 2, PREFIX, 64).bfloat16()
    q, k, v = rows
    q_gpu, k_gpu, v_gpu = (x.cuda() for x in rows)
    suffix, suffix_gpu = ReadPrefix(kv, LENGTHS), ReadPrefix(kv.cuda(), LENGTHS)
    for here, there in (
        (causal(q, k, v, 0.125), causal(q_gpu, k_gpu, v_gpu, 0.125)),
        (suffix.attend(0, q, k, v, 0.125), suffix_gpu.attend(0, q_gpu, k_gpu, v_gpu, 0.125)),
    ):
        assert there.shape == here.shape
        assert off(there.cpu(), here) < 0.01


def test_a_long_prefix_is_not_copied_for_each_response() -> None:
    """Eight responses over 16,384 tokens: what is allocated is of the responses' size, not eight prefixes'."""
    from rollplex.backends.cuda.attention import Lengths, packed_after_prefix

    n, s, p, heads, kv_heads, d = 8, 128, 16384, 16, 2, 128
    q, k, v = drawn(n * s, heads, d), drawn(n * s, kv_heads, d), drawn(n * s, kv_heads, d)
    prefix_k, prefix_v = drawn(kv_heads, p, d), drawn(kv_heads, p, d)
    lengths = Lengths.of([s] * n, torch.device("cuda"))
    packed_after_prefix(q, k, v, lengths, prefix_k, prefix_v, d**-0.5).sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed_after_prefix(q, k, v, lengths, prefix_k, prefix_v, d**-0.5)
    one_prefix = 2 * kv_heads * p * d * 2
    assert torch.cuda.max_memory_allocated() - before < 12 * q.numel() * 2 < n * one_prefix


def off(found: Tensor, right: Tensor) -> float:
    """The error as a share of the norm."""
    return float((found.detach().double() - right.detach()).norm() / right.detach().norm())
