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
    with torch.no_grad():
        assert torch.equal(packed_after_prefix(q, k, v, lengths, prefix_k, prefix_v, d**-0.5), out)
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


def attended(t: int, p: int, *, slot: bool, room: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of q, k and v, and attention written out; a slot's tail is finite and unlike its keys."""
    from rollplex.backends.cuda.one_sequence import attend, attend_backward

    torch.manual_seed(t)
    heads, kv_heads, d = 16, 2, 128
    q, grad = (torch.randn(t, heads, d, device="cuda").bfloat16() for _ in range(2))
    if slot:
        whole = [torch.randn(kv_heads, p + room, d, device="cuda").bfloat16() for _ in range(2)]
        k, v = (x[:, :p] for x in whole)
    else:
        k, v = (torch.randn(p, kv_heads, d, device="cuda").bfloat16() for _ in range(2))
    found = attend(q, k, v, d**-0.5, slot=slot)
    got = [found.out, *attend_backward(grad, q, k, v, found, d**-0.5, slot=slot)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (x.transpose(0, 1) if slot else x for x in exact[1:])
    scores = torch.einsum("qhd,khd->hqk", exact[0], wide_k.repeat_interleave(8, 1)) * d**-0.5
    if not slot:
        hidden = torch.ones(t, p, dtype=torch.bool, device="cuda").tril().logical_not()
        scores = scores.masked_fill(hidden, float("-inf"))
    wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_v.repeat_interleave(8, 1))
    wanted.backward(grad.double())
    return got, [wanted, *(x.grad for x in exact if x.grad is not None)]


@pytest.mark.parametrize("t", [2, 700, 1024, 1030])
def test_a_long_prompt_sees_itself(t: int) -> None:
    """Lengths that share a graph, and one behind it."""
    for found, right in zip(*attended(t, t, slot=False), strict=True):
        assert off(found, right) < 0.012


@pytest.mark.parametrize("room", [0, 200])
def test_responses_over_a_slot_with_room_behind_its_keys(room: int) -> None:
    for found, right in zip(*attended(300, 520, slot=True, room=room), strict=True):
        assert off(found, right) < 0.012


@pytest.mark.parametrize("slot", [False, True])
def test_a_backward_has_the_same_bits_each_time(slot: bool) -> None:
    first, second = (attended(2000, 2000, slot=slot)[0] for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("slot", [False, True])
def test_where_too_much_would_be_summed_apart_another_backward_goes_on(
    monkeypatch: pytest.MonkeyPatch, slot: bool
) -> None:
    from rollplex.backends.cuda import one_sequence

    monkeypatch.setattr(one_sequence, "sums_apart", lambda *_: False)
    for found, right in zip(*attended(300, 300, slot=slot), strict=True):
        assert off(found, right) < 0.012


def test_what_a_backward_takes_is_what_a_plan_counts() -> None:
    """Beside its outputs: the sums of blocks of keys."""
    from rollplex.backends.attention_sums import HEAD_ROW_BYTES, KEY_BLOCK
    from rollplex.backends.cuda.one_sequence import attend, attend_backward

    t, heads, kv_heads, d = 2048, 16, 2, 128
    q, k, v = (torch.randn(t, n, d, device="cuda").bfloat16() for n in (heads, kv_heads, kv_heads))
    found = attend(q, k, v, d**-0.5, slot=False)
    attend_backward(q, q, k, v, found, d**-0.5, slot=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend_backward(q, q, k, v, found, d**-0.5, slot=False)
    outputs = 2 * (q.numel() + k.numel() + v.numel())
    planned = heads * ((t // KEY_BLOCK * t + t) * HEAD_ROW_BYTES + 4 * t)
    assert torch.cuda.max_memory_allocated() - before - outputs <= planned + 4096  # of cuDNN's own notes


def test_attention_runs_on_a_part_of_the_gpu() -> None:
    """cuDNN's handle belongs to the whole device, the stream to a green context."""
    from rollplex.backends.cuda.one_sequence import attend
    from rollplex.backends.cuda.partition import Partition

    q, k, v = (torch.randn(1500, n, 128, device="cuda").bfloat16() for n in (16, 2, 2))
    whole = attend(q, k, v, 0.1, slot=False).out
    with Partition(0, 32)():
        part = attend(q, k, v, 0.1, slot=False).out
    torch.cuda.synchronize()
    assert torch.equal(whole, part)


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


@pytest.mark.parametrize("hopper", [True, False])
def test_runs_take_what_a_plan_counts_and_say_what_one_call_says(
    monkeypatch: pytest.MonkeyPatch, hopper: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight responses of 2000 tokens; the limit has room for two of them in a call over their prefix."""
    from rollplex.backends import attention_sums
    from rollplex.backends.cuda import one_sequence

    if not hopper:
        monkeypatch.setattr(one_sequence, "_hopper", lambda _: False)
    whole, once = after_one_prefix()
    sms = one_sequence.sms(torch.device("cuda", 0))
    monkeypatch.setattr(attention_sums, "LARGEST_SUMS", attention_sums._by_sms(16, sms, 4000, 1))
    (parts, peak), (again, _) = after_one_prefix(), after_one_prefix()
    with capsys.disabled():
        print(f"\n  a backward takes {once / 2**20:.0f} MiB in one call, {peak / 2**20:.0f} MiB in runs")
    assert all(torch.equal(x, y) for x, y in zip(parts, again, strict=True))
    for found, right in zip(parts, whole, strict=True):
        assert off(found, right) < 0.012
    own = sum(x.numel() * x.element_size() for x in whole[:3])
    shared = sum(x.numel() * (4 + x.element_size()) for x in whole[3:])
    expanded = 2 * 16 * 16_000 * 128 * 2  # gradients of keys and values of a call, for each head
    assert peak <= 3 * own + attention_sums.LARGEST_SUMS + shared + expanded
    assert peak < once or hopper


def after_one_prefix() -> tuple[list[Tensor], int]:
    """Gradients of 8 x 2000 tokens behind 1024, deterministic as a worker asks for them; bytes at their peak."""
    from rollplex.backends.cuda.attention import Lengths, packed_after_prefix

    torch.manual_seed(5)
    lengths, heads, kv_heads, d = [2000] * 8, 16, 2, 128
    given = [drawn(sum(lengths), n, d) for n in (heads, kv_heads, kv_heads)]
    given += [drawn(kv_heads, 1024, d) for _ in range(2)]
    q, k, v, prefix_k, prefix_v = given
    out = packed_after_prefix(q, k, v, Lengths.of(lengths, torch.device("cuda")), prefix_k, prefix_v, d**-0.5)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, asked = torch.cuda.memory_allocated(), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        found = list(torch.autograd.grad(out, given, out.detach()))
    finally:
        torch.use_deterministic_algorithms(asked)
    torch.cuda.synchronize()
    return found, torch.cuda.max_memory_allocated() - before


def off(found: Tensor, right: Tensor) -> float:
    """The error as a share of the norm."""
    return float((found.detach().double() - right.detach()).norm() / right.detach().norm())
