"""vLLM's parameters by name, and the region of the shard or the tensor of the tower that each is.

language_model.model.layers.0.self_attn.qkv_proj.weight    layers.0.self_attn.qkv.weight
language_model.model.layers.0.self_attn.o_proj.weight      layers.0.self_attn.o_proj.weight, read through .t()
language_model.lm_head.weight                              lm_head.weight; a tied model has none
visual.blocks.0.attn.qkv.weight                            model.visual.blocks.0.attn.qkv.weight

A text model has no `language_model.` before its names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from rollplex.backends.rollout.sampler import Served
from rollplex.backends.shard import Region

FUSED = {"qkv": "qkv_proj", "gate_up": "gate_up_proj"}
TOWER = "model.visual."


def parameters(served: Served) -> dict[str, Tensor]:
    """Every parameter of a rank's model as the view that vLLM reads, [O, I] whatever it is stored as."""
    base = "language_model." if served.tower else ""
    found = {base + language_name(r.name): _read(r, served) for r in served.shard.regions}
    return found | dict(_tower(served.tower))


def language_name(region: str) -> str:
    """vLLM's name of a region: `layers.0.mlp.gate_up.weight` is model.layers.0.mlp.gate_up_proj.weight."""
    if region.startswith("lm_head."):
        return region
    owner, _, leaf = region.rpartition(".")
    before, _, module = owner.rpartition(".")
    return f"model.{before}{'.' if before else ''}{FUSED.get(module, module)}.{leaf}"


def _read(region: Region, served: Served) -> Tensor:
    held = region.held(served.snapshot, served.buffer)
    return held.t() if region.transposed and region.own is None else held


def _tower(tower: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Gate and up lie apart, and are two weights inside what takes the place of vLLM's fused one (layers.py)."""
    for name, view in tower.items():
        for part in ("gate_proj", "up_proj"):
            name = name.replace(f".mlp.{part}.", f".mlp.gate_up_proj.{part}.")
        yield f"visual.{name.removeprefix(TOWER)}", view
