"""A backward of some responses at a time, on a host and by a GPU's own code over attention written out.

responses   [ 5 ] [ 5 ] [ 5 ] ..   each after one prefix of 7 and itself
one call    all of them
runs        [0, 1] [2, 3] [4]      gradients of the prefix summed up in FP32, those of responses end to end
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from rollplex.backends import attention_sums
from rollplex.backends.cuda import attention as gpu
from rollplex.backends.cuda import one_sequence
from rollplex.backends.cuda.one_sequence import Attended
from rollplex.backends.in_runs import in_runs
from rollplex.backends.training.attention import causal, causal_after, expand, pack, unpack
from rollplex.backends.training.attention import merge as merge_of_two

HEADS, KV_HEADS, D, PREFIX = 6, 2, 8, 7
SCALE = D**-0.5
LENGTHS = (3, 5, 1, 4, 6)
SMS = 4
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def whole(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[s, heads, d] over [p + s, kv_heads, d] of a whole sequence: every score, the last s rows."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    s, every = len(q), len(keys)
    hidden = torch.ones(s, every, dtype=torch.bool).tril(every - s).logical_not()
    scores = (torch.einsum("qhd,khd->hqk", q, keys) * SCALE).masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def gradients(out: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
    """Of a fixed loss."""
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return list(torch.autograd.grad(out, given, weight))


def limited(monkeypatch: pytest.MonkeyPatch, queries: int, heads: int, sms: int) -> None:
    """The limit has room for so many queries, and none is for rows that a kernel leaves free."""
    monkeypatch.setattr(attention_sums, "QUERY_BLOCK", 0)
    monkeypatch.setattr(attention_sums, "LARGEST_SUMS", attention_sums._by_sms(heads, sms, queries, 1))


# ---- on a host: sequences side by side


def side_by_side(dtype: torch.dtype, pieces: int = 1) -> list[Tensor]:
    """q, k, v [n, heads, s, d] of five responses of five tokens, keys and values of each piece."""
    torch.manual_seed(3)
    own = [drawn(5, heads, 5, D, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return own + [drawn(KV_HEADS, PREFIX + i // 2, D, dtype=dtype) for i in range(2 * pieces)]


def on_a_host(given: Sequence[Tensor]) -> Tensor:
    q, k, v, *pieces = given
    return causal_after(q, k, v, list(zip(pieces[::2], pieces[1::2], strict=True)), SCALE)


def host_runs() -> int:
    return len(attention_sums.runs([5] * 5, HEADS, 1, as_one=True))


@pytest.mark.parametrize("pieces", [0, 1, 2])
@pytest.mark.parametrize(("queries", "count"), [(25, 1), (13, 3), (5, 5)])
def test_runs_on_a_host_are_the_full_sequences_gradients(
    monkeypatch: pytest.MonkeyPatch, queries: int, count: int, pieces: int
) -> None:
    given = side_by_side(torch.float64, pieces)
    q, k, v, *before = given
    rows = []
    for own_q, own_k, own_v in zip(q, k, v, strict=True):
        keys, values = (torch.cat([*x, own], 1) for x, own in ((before[::2], own_k), (before[1::2], own_v)))
        rows.append(whole(*(x.transpose(0, 1) for x in (own_q, keys, values))).transpose(0, 1))
    limited(monkeypatch, queries, HEADS, 1)
    assert host_runs() == count
    out = on_a_host(given)
    right = torch.stack(rows)
    torch.testing.assert_close(out, right, atol=1e-10, rtol=0)
    for found, wanted in zip(gradients(out, given), gradients(right, given), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_has_the_bits_of_a_call_by_itself(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Responses end to end, the prefix's gradients added up in the order of runs; all of them again the same bits."""
    given = side_by_side(dtype)
    limited(monkeypatch, 13, HEADS, 1)
    found = gradients(on_a_host(given), given)
    assert all(torch.equal(x, y) for x, y in zip(found, gradients(on_a_host(given), given), strict=True))
    q, k, v, *prefix = given
    weight = torch.linspace(-1, 1, q.numel(), dtype=dtype).reshape(q.shape)
    sums, own = [torch.zeros_like(x) for x in prefix], []
    for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):
        alone = [x[rows] for x in (q, k, v)]
        of_run = torch.autograd.grad(on_a_host([*alone, *prefix]), [*alone, *prefix], weight[rows])
        own.append(of_run[:3])
        for total, gradient in zip(sums, of_run[3:], strict=True):
            total += gradient
    by_hand = [torch.cat(parts) for parts in zip(*own, strict=True)] + sums
    assert all(torch.equal(x, y) for x, y in zip(found, by_hand, strict=True))


def test_all_in_one_run_has_the_bits_of_the_kernels() -> None:
    """Without a limit in the way: one call for what responses see of themselves, one for the prefix."""
    given = side_by_side(torch.float32)
    out, packed = on_a_host(given), partial(pack, kv_heads=KV_HEADS)
    q, k, v, prefix_k, prefix_v = (x.detach() for x in given)
    wide = (q, *(expand(x, HEADS // KV_HEADS) for x in (k, v)))
    own, own_lse = FORWARD(*wide, 0.0, True, scale=SCALE)
    seen, seen_lse = FORWARD(packed(q), prefix_k[None], prefix_v[None], 0.0, False, scale=SCALE)
    _, lse = merge_of_two(own, own_lse, unpack(seen, q), unpack(seen_lse[..., None], q)[..., 0])
    grad = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    dq, dk, dv = BACKWARD(grad, *wide, out.detach(), lse, 0.0, True, scale=SCALE)
    of_prefix = (packed(grad), packed(q), prefix_k[None], prefix_v[None], packed(out.detach()), packed(lse[..., None]))
    dq_a, dk_a, dv_a = BACKWARD(*of_prefix[:5], of_prefix[5][..., 0], 0.0, False, scale=SCALE)
    dk, dv = (x.unflatten(1, (KV_HEADS, -1)).sum(2) for x in (dk, dv))
    by_hand = [dq + unpack(dq_a, q), dk, dv, dk_a[0], dv_a[0]]
    assert all(torch.equal(x, y) for x, y in zip(gradients(out, given), by_hand, strict=True))


def test_sums_of_runs_are_rounded_once() -> None:
    """256 + 1 + 1 is 258, which bfloat16 has; adding in bfloat16, in which 257 is 256, would never leave 256."""
    says = torch.tensor([256, 1, 1], dtype=torch.bfloat16).split(1)
    runs = [(slice(i, i + 1), slice(i, i + 1)) for i in range(3)]
    own, shared = in_runs(runs, lambda run, _: (says[run.start], says[run.start]), [torch.cat(says)], [says[0]])
    assert own.tolist() == [256, 1, 1]
    assert (shared.item(), shared.dtype) == (258, torch.bfloat16)
    assert (says[0] + says[1] + says[2]).item() == 256


# ---- a GPU's own code, its kernels written out: responses end to end


def scores(q: Tensor, k: Tensor, bounds: Tensor, of_keys: Tensor, causal: bool) -> Tensor:
    """[heads, queries, keys]: -inf where a query is of another sequence, or before its key."""
    at_q, at_k = torch.arange(len(q)), torch.arange(len(k))
    of_q, of_k = (torch.bucketize(x, b[1:], right=True) for x, b in ((at_q, bounds), (at_k, of_keys)))
    hidden = of_q[:, None] != of_k
    hidden = hidden | (at_q[:, None] < at_k) if causal else hidden
    return (torch.einsum("qhd,khd->hqk", q, expanded(k)) * SCALE).masked_fill(hidden, float("-inf"))


def expanded(kv: Tensor) -> Tensor:
    return kv.repeat_interleave(HEADS // KV_HEADS, 1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, of_keys: Tensor, _: int, __: int, ___: float, causal: bool,
    *____: object, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    found = scores(q, k, bounds, of_keys, causal)
    return torch.einsum("hqk,khd->qhd", found.softmax(-1), expanded(v)), found.logsumexp(-1), bounds, bounds, bounds


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor, of_keys: Tensor,
    longest: int, _: int, __: float, causal: bool, *___: object, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Dao et al. 2022, algorithm 4, with an output and log-sum-exp that may be merged with others."""
    assert (int(bounds[0]), int(bounds[-1]), int(bounds.diff().max())) == (0, len(q), longest)
    assert lse.shape == (HEADS, len(q))
    weights = (scores(q, k, bounds, of_keys, causal) - lse[..., None]).exp()
    delta = (grad * out).sum(-1).T[..., None]
    inner = weights * (torch.einsum("qhd,khd->hqk", grad, expanded(v)) - delta) * scale
    dk, dv = torch.einsum("hqk,qhd->khd", inner, q), torch.einsum("hqk,qhd->khd", weights, grad)
    dk, dv = (x.unflatten(1, (KV_HEADS, -1)).sum(2) for x in (dk, dv))
    return torch.einsum("hqk,khd->qhd", inner, expanded(k)), dk, dv


def merge(out: Tensor, lse: Tensor, other: Attended) -> tuple[Tensor, Tensor]:
    both = torch.logaddexp(lse, other.lse)
    mine, others = ((x - both).exp().T[..., None] for x in (lse, other.lse))
    return out * mine + other.out * others, both


def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """These in place of the kernels; what is called backward, with its queries."""
    called: list[tuple[str, int]] = []

    def noted(part: str) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *given, **named: called.append((part, len(given[0]))) or backward(*given, **named)

    for where, name, what in (
        (gpu, "_forward", forward), (gpu, "_backward", noted("own")), (gpu, "_merge", merge),
        (one_sequence, "_flash", forward), (one_sequence, "_flash_backward", noted("prefix")),
        (one_sequence, "_hopper", lambda _: False), (one_sequence, "sms", lambda _: SMS),
    ):  # fmt: skip
        monkeypatch.setattr(where, name, what)
    return called


@pytest.mark.parametrize(
    ("queries", "calls"),
    [
        (19, [("own", 19), ("prefix", 19)]),
        (8, [("own", 8), ("own", 5), ("own", 6), ("prefix", 8), ("prefix", 5), ("prefix", 6)]),
        (1, [(part, n) for part in ("own", "prefix") for n in LENGTHS]),
    ],
)
def test_runs_on_a_gpu_are_the_full_sequences_gradients(
    monkeypatch: pytest.MonkeyPatch, queries: int, calls: list[tuple[str, int]]
) -> None:
    called = written(monkeypatch)
    limited(monkeypatch, queries, HEADS, SMS)
    torch.manual_seed(4)
    t = sum(LENGTHS)
    given = [drawn(t, heads, D) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    given += [drawn(KV_HEADS, PREFIX, D), drawn(KV_HEADS, PREFIX, D)]
    q, k, v, prefix_k, prefix_v = given
    lengths = gpu.Lengths.of(list(LENGTHS), torch.device("cpu"))
    out = gpu.packed_after_prefix(q, k, v, lengths, prefix_k, prefix_v, SCALE)
    rows = zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    behind = [[torch.cat([x.transpose(0, 1), own]) for x, own in ((prefix_k, b), (prefix_v, c))] for _, b, c in rows]
    right = torch.cat([whole(a, *both) for a, both in zip(q.split(LENGTHS), behind, strict=True)])
    torch.testing.assert_close(out, right, atol=1e-10, rtol=0)
    for found, wanted in zip(gradients(out, given), gradients(right, given), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)
    assert called == calls


def test_rows_of_a_run_have_a_graphs_room_behind_them() -> None:
    """1100 of 3000 rows: what cuDNN's graph of 2048 reads behind them is finite; all rows are taken as they are."""
    found = Attended(torch.randn(3000, 2, 8), torch.randn(2, 3072))
    assert found.rows(slice(0, 3000)) is found
    out, lse = found.rows(slice(500, 1600))
    assert torch.equal(out, found.out[500:1600])
    assert (lse.shape, lse.is_contiguous()) == ((2, 2048), True)
    assert torch.equal(lse[:, :1100], found.lse[:, 500:1600])
    assert not lse[:, 1100:].any()


def test_one_sequence_alone_has_no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix's own backward is one call, whatever the limit."""
    monkeypatch.setattr(attention_sums, "LARGEST_SUMS", 0)
    q, k, v = side_by_side(torch.float64, 0)
    once = gradients(causal(q[:1], k[:1], v[:1], SCALE), (q, k, v))
    right = whole(*(x[0].transpose(0, 1) for x in (q, k, v))).transpose(0, 1)[None]
    for found, wanted in zip(once, gradients(right, (q, k, v)), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)
