"""The vision tower's windows in one call a length give what transformers' one call a window gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_tiny import CONFIG
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from rollplex.backends.hf.windows import install_windows


@pytest.mark.parametrize("grid", [[[1, 4, 6]], [[2, 6, 6]], [[4, 6, 10], [1, 4, 4]], [[3, 8, 8]]])
def test_windows_together_equal_windows_alone(grid: list[list[int]]) -> None:
    """Even and uneven windows, several frames, two videos: features and gradients to 1e-12 in float64."""
    torch.manual_seed(0)
    config: Any = Qwen2_5_VLConfig.from_dict(CONFIG).vision_config
    config._attn_implementation = "sdpa"
    tower = Qwen2_5_VisionTransformerPretrainedModel(config).double()
    thw = torch.tensor(grid)
    pixels = torch.randn(int(thw.prod(1).sum()), 1176, dtype=torch.float64)

    def run() -> list[torch.Tensor]:
        tower.zero_grad()
        out = tower(pixels, thw)
        features = out if isinstance(out, torch.Tensor) else out.pooler_output
        (features * torch.linspace(-1, 1, features.numel(), dtype=torch.float64).view_as(features)).sum().backward()
        return [features.detach(), *(p.grad.clone() for p in tower.parameters() if p.grad is not None)]

    alone = run()
    install_windows(config)
    together = run()
    assert len(alone) == len(together) > 10
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
