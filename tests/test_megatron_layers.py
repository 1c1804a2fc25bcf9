"""Our forward of a layer against Megatron's own, of the same modules: output and gradients, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_tiny import CONFIG, oracle_model
from megatron_tiny import make_rank
from torch import Tensor

from benchmarks.layers import MEGATRONS


def run(layer: Any, hidden: Tensor, angles: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, the gradient of what went in, and those of all parameters."""
    hidden = hidden.clone().requires_grad_()
    found = layer(hidden, attention_mask=None, rotary_pos_emb=angles)
    out = found[0] if isinstance(found, tuple) else found
    return [out, *torch.autograd.grad(out, [hidden, *layer.parameters()], grad)]


def test_a_layer_is_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = dict(oracle_model(CONFIG, torch.float64).state_dict())
    rank, _pages = make_rank(CONFIG, weights, torch.float64)
    layer, tokens = rank.model.layers[0], 11
    assert {type(m) for m in layer.modules()} >= set(MEGATRONS)
    torch.manual_seed(0)
    hidden, grad = (torch.randn(tokens, 1, layer.config.hidden_size, dtype=torch.float64) for _ in range(2))
    angles = rank.model.angles(torch.arange(tokens).expand(3, -1))
    ours = run(layer, hidden, angles, grad)
    for own, theirs in MEGATRONS.items():
        monkeypatch.setattr(own, "forward", theirs.forward)
    for found, wanted in zip(ours, run(layer, hidden, angles, grad), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert found.abs().max() > 0
