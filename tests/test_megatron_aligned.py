"""Padded and joined products against torch's linears, forward and backward; on a GPU in bfloat16 too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("megatron.core")

from rollplex.backends.megatron.aligned import joined, odd, padded

DEVICES = [
    pytest.param("cpu", torch.float64, 1e-12),
    pytest.param("cpu", torch.float32, 1e-5),
    pytest.param(
        "cuda", torch.bfloat16, 2e-2, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
    ),
]


def drawn(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()


def grads(out: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, of, torch.ones_like(out) / out.shape[-1])


@pytest.mark.parametrize(("device", "dtype", "close"), DEVICES)
@pytest.mark.parametrize("width", [3420, 16, 5])
def test_zeros_behind_the_rows_change_nothing(device: str, dtype: torch.dtype, close: float, width: int) -> None:
    """[7, 1, n] x [24, n]: the product, and both gradients in their own shapes."""
    rows, weight = (drawn(*shape, device=device, dtype=dtype) for shape in ((7, 1, width), (24, width)))
    ours, theirs = padded(rows, weight), F.linear(rows.double(), weight.double())
    assert ours.shape == (7, 1, 24)
    scale = width**0.5
    torch.testing.assert_close(ours.double() / scale, theirs / scale, rtol=close, atol=close)
    with torch.no_grad():
        assert torch.equal(padded(rows, weight), ours)
    for found, wanted in zip(grads(ours, rows, weight), grads(theirs, rows, weight), strict=True):
        assert found.shape == wanted.shape
        torch.testing.assert_close(found.double(), wanted.double(), rtol=close, atol=close)


@pytest.mark.parametrize(("device", "dtype", "close"), DEVICES)
@pytest.mark.parametrize("bias", [True, False])
def test_gate_and_up_as_one_product(device: str, dtype: torch.dtype, close: float, bias: bool) -> None:
    """[7, 1, 32] -> [gate | up], 2 x 20: as two linears and a `cat`, with the gradients of each."""
    gate, up = (nn.Linear(32, 20, bias=bias, dtype=dtype, device=device) for _ in range(2))
    hidden = drawn(7, 1, 32, device=device, dtype=dtype)
    leaves = (hidden, *gate.parameters(), *up.parameters())
    ours, theirs = joined(hidden, gate, up), torch.cat([gate(hidden), up(hidden)], dim=-1)
    torch.testing.assert_close(ours, theirs, rtol=close, atol=close)
    with torch.no_grad():
        assert torch.equal(joined(hidden, gate, up), ours)
    for found, wanted in zip(grads(ours, *leaves), grads(theirs, *leaves), strict=True):
        torch.testing.assert_close(found, wanted, rtol=close, atol=close)


def test_what_is_kept_for_the_backward_are_inputs_and_parameters() -> None:
    """No padded or joined copy: a plan's saved state has no room for them."""
    rows, weight = (drawn(*shape, device="cpu", dtype=torch.float32) for shape in ((7, 1, 5), (24, 5)))
    gate, up = nn.Linear(5, 6), nn.Linear(5, 6)
    known, kept = {x.data_ptr() for x in (rows, weight, gate.weight, up.weight)}, set[int]()

    def pack(x: Tensor) -> Tensor:
        kept.add(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        padded(rows, weight)
        joined(rows, gate, up)
    assert kept == known


def test_frozen_weights_have_no_gradient() -> None:
    rows, weight = drawn(7, 1, 5, device="cpu", dtype=torch.float32), torch.ones(24, 5)
    (found,) = grads(padded(rows, weight), rows)
    torch.testing.assert_close(found, torch.ones_like(rows))
    gate, up = (nn.Linear(5, 6).requires_grad_(False) for _ in range(2))
    (found,) = grads(joined(rows, gate, up), rows)
    torch.testing.assert_close(found, (gate.weight + up.weight).sum(0).expand_as(rows) / 12)


def test_a_host_multiplies_as_before() -> None:
    assert not odd(torch.zeros(2, 5))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize(("width", "is_odd"), [(3420, True), (3424, False), (11008, False)])
def test_which_rows_are_odd(width: int, is_odd: bool) -> None:
    assert odd(torch.zeros(2, width, dtype=torch.bfloat16, device="cuda")) is is_odd
