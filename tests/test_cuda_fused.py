"""Rotary embeddings and SwiGLU of one kernel are those of torch's operators, forward and backward; needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
EXACT = 1e-6


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The textbook's: pairs are element i and i + d / 2."""
    first, second = x.chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


@pytest.mark.parametrize(("heads", "d"), [(16, 128), (2, 128), (16, 80), (5, 20)])
def test_heads_are_turned_as_torch_turns_them(heads: int, d: int) -> None:
    """A slice of a fused projection, as layers hand it over."""
    from rollplex.backends.cuda.fused import rotate

    fused = drawn(37, heads + 3, d).requires_grad_()
    angles, upstream = drawn(37, d // 2), drawn(37, heads, d)
    ours, theirs = (f(fused[:, 2 : 2 + heads], angles.cos(), angles.sin()) for f in (rotate, turned))
    torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)
    with torch.no_grad():
        assert torch.equal(rotate(fused[:, 2 : 2 + heads], angles.cos(), angles.sin()), ours)
    found, wanted = (torch.autograd.grad(y, fused, upstream)[0] for y in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("width", [11008, 3420, 7])
def test_a_gate_is_torchs_and_so_is_its_backward(width: int) -> None:
    from rollplex.backends.cuda.fused import swiglu

    both = drawn(19, 1, 2 * width).requires_grad_()
    gate, up = both.chunk(2, dim=-1)
    ours, theirs, upstream = swiglu(both), silu(gate) * up, drawn(19, 1, width)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(swiglu(both), ours)
    found, wanted = (torch.autograd.grad(y, both, upstream)[0] for y in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_kernels_run_where_their_tensors_are() -> None:
    """Triton launches on the current device, which need not be that of the tensors."""
    from rollplex.backends.cuda.fused import rotate, swiglu

    both, angles = drawn(19, 1, 2 * 64), drawn(19, 8)
    there, turned_by = both.to("cuda:1"), angles.to("cuda:1")
    gate, up = both.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(there).cpu(), (silu(gate) * up).cpu(), rtol=1e-5, atol=1e-5)
    x = drawn(19, 4, 16)
    found = rotate(x.to("cuda:1"), turned_by.cos(), turned_by.sin())
    torch.testing.assert_close(found.cpu(), turned(x, angles.cos(), angles.sin()).cpu(), rtol=EXACT, atol=EXACT)


def test_bfloat16_is_rounded_once() -> None:
    from rollplex.backends.cuda.fused import rotate, swiglu

    x, both, angles = drawn(9, 4, 64, dtype=torch.bfloat16), drawn(9, 96, dtype=torch.bfloat16), drawn(9, 32)
    exact = turned(x.float(), angles.cos(), angles.sin()).bfloat16()
    torch.testing.assert_close(rotate(x, angles.cos(), angles.sin()), exact, rtol=0, atol=0)
    gate, up = both.float().chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(both), (silu(gate) * up).bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(("heads", "d", "more"), [(16, 128, 0), (28, 128, 600), (5, 80, 27)])
def test_two_sets_of_keys_are_merged_as_one_softmax(heads: int, d: int, more: int) -> None:
    """Log-sum-exps of the second lie in rows with room behind them."""
    from rollplex.backends.cuda.fused import merge

    tokens = 33
    outs, sums = (
        [drawn(tokens, heads, d + i)[..., :d].contiguous() for i in range(2)],
        [drawn(heads, tokens), drawn(heads, tokens + more)],
    )
    shares = torch.stack([sums[0], sums[1][:, :tokens]]).softmax(0).transpose(1, 2)[..., None]
    wanted = outs[0] * shares[0] + outs[1] * shares[1]
    both = torch.logaddexp(sums[0], sums[1][:, :tokens])
    found, rows = merge(outs[0], sums[0], outs[1], sums[1])
    torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(rows[:, :tokens], both, rtol=EXACT, atol=EXACT)
    assert rows.shape == sums[1].shape
