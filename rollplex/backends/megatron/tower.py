"""The vision tower of Megatron's modules, whole on every rank, its parameters in Hugging Face's order.

The plan repeats the tower on every rank, and both engines read one copy of it: so QKV is [Q; K; V] and gate and up are
two parameters, where Megatron's own would interleave heads and fuse.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionPatchEmbed

from rollplex.backends.hf.windows import window_attention
from rollplex.backends.megatron.grid import Grid
from rollplex.backends.megatron.groups import Alone, groups_of
from rollplex.backends.megatron.layers import Attention, layer_spec, run_layers
from rollplex.backends.megatron.linears import Column, Row, SplitGateUp
from rollplex.backends.megatron.rotary import Fused
from rollplex.backends.megatron.settings import projector_settings, vision_settings


class TowerAttention(Attention):
    """Self attention whose fused rows are [Q; K; V], each all heads."""

    @property
    def fused(self) -> Fused:
        """One group."""
        return Fused(1, self.num_attention_heads_per_partition, self.num_attention_heads_per_partition)


class WindowAttention(nn.Module):
    """Core attention inside windows; `attention_mask` holds their bounds."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value.contiguous()))  # as in SharedPrefixAttention
        out, _weights = window_attention(None, q, k, v, None, self.scale, cu_seq_lens_q=attention_mask)
        return out.transpose(0, 1).flatten(2)


class Tower(nn.Module):
    """Patches of one image or video -> features [merged patches, hidden of the language model], in their order."""

    def __init__(self, parsed: Any, dtype: torch.dtype) -> None:
        super().__init__()
        vision = parsed.vision_config
        alone: Any = Alone()
        settings = vision_settings(parsed, dtype)
        spec = layer_spec(TowerAttention, WindowAttention, Row, SplitGateUp, Row)
        self.vision = vision
        self.patch_embed = Qwen2_5_VisionPatchEmbed(
            vision.patch_size, vision.temporal_patch_size, vision.in_channels, vision.hidden_size
        )
        make: Any = build_module
        self.blocks = nn.ModuleList(
            make(spec, config=settings, layer_number=i + 1, pg_collection=groups_of(alone)) for i in range(vision.depth)
        )
        self.ln_q = nn.RMSNorm(vision.hidden_size, eps=settings.layernorm_epsilon)
        width = vision.hidden_size * vision.spatial_merge_size**2
        linears = MLPSubmodules(linear_fc1=Column, linear_fc2=Row)
        self.projector = MultimodalProjector(projector_settings(parsed, dtype), linears, "mlp", width, alone)

    def forward(self, pixels: Tensor, grid_thw: Tensor, recompute: bool = False) -> Tensor:
        grid = self._grid(grid_thw)
        order, windows = grid.windows()
        hidden = _reorder(self.patch_embed(pixels), order)[:, None]
        rotary = _reorder(self._angles(grid.coordinates()), order)[:, None, None].to(pixels.device)
        full = self.vision.fullatt_block_indexes
        masks = [grid.whole_frames() if i in full else windows for i in range(len(self.blocks))]
        hidden = run_layers(self.blocks, hidden, masks, rotary, recompute)
        merged = self.ln_q(hidden).view(len(order), 1, -1)
        return self.projector(merged)[:, 0][torch.argsort(order)]

    def _grid(self, grid_thw: Tensor) -> Grid:
        ((frames, height, width),) = grid_thw.tolist()
        merge = self.vision.spatial_merge_size
        return Grid(frames, height, width, merge, self.vision.window_size // self.vision.patch_size // merge)

    def _angles(self, coordinates: Tensor) -> Tensor:
        """Rotary angles [patches, head_dim]: a quarter of the frequencies by row, a quarter by column, both twice."""
        half = self.vision.hidden_size // self.vision.num_heads // 2
        base = self.vision.rope_parameters["rope_theta"]
        frequencies = 1.0 / base ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        rows, columns = coordinates[..., None] * frequencies
        return torch.cat([rows, columns, rows, columns], dim=-1)


def _reorder(patches: Tensor, order: Tensor) -> Tensor:
    """Rows [patches, n] window by window; `order` counts merged patches."""
    return patches.unflatten(0, (len(order), -1))[order].flatten(0, 1)
