"""Weights of a model of make.py as safetensors, drawn on a GPU: a host takes minutes for 3 B numbers.

python -m benchmarks.h200.weights benchmarks/h200/3b /dev/shm/3b
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from rollplex.backends.training.placement import INITIAL_STD
from rollplex.ir.models import load_model


def main() -> None:
    """One file; the same numbers on every GPU of a kind."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=torch.bfloat16)
        found = torch.randn(shape, generator=generator, device="cuda") * INITIAL_STD
        return found.to("cpu", torch.bfloat16)

    save_file({t.name: drawn(t.name, t.shape) for t in load_model(str(source)).tensors()}, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    print(json.dumps({"weights": str(target)}))


if __name__ == "__main__":
    main()
