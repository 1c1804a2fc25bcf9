"""SwiGLU and merging of one kernel are those of torch's operators, forward and backward; needs a GPU."""

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
    from rollplex.backends.cuda.fused import swiglu

    both = drawn(19, 1, 2 * 64)
    gate, up = both.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(both.to("cuda:1")).cpu(), (silu(gate) * up).cpu(), rtol=1e-5, atol=1e-5)


def test_a_gate_of_bfloat16_is_rounded_once() -> None:
    from rollplex.backends.cuda.fused import swiglu

    both = drawn(9, 96, dtype=torch.bfloat16)
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
