"""Weights of a Hugging Face directory: read straight into the caller's memory, written so that transformers loads them.

On disk Qwen2.5-VL keeps its old names (`visual.`, `model.layers.`); in memory they are named_parameters() of
transformers 5 (`model.visual.`, `model.language_model.layers.`). Both are read, the old ones are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollplex.ir.errors import JobError, Problem


def load_weights(directory: str | Path, views: Mapping[str, Tensor]) -> None:
    """Copy every tensor of the directory's safetensors files into the view of its name, cast to the view's dtype.

    JobError lists all missing names and wrong shapes at once; a tied model needs no head. Names that no view has are
    ignored (a checkpoint may hold more).
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise JobError("no .safetensors file here", where=directory, hint="save the model with save_pretrained")
    missing = set(views)
    problems: list[Problem] = []
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 (not a dict)
                    name = memory_name(key)
                    if name in views:
                        missing.discard(name)
                        problems += _copy(views[name], opened.get_tensor(key), name, file)
        except (SafetensorError, OSError) as err:
            raise JobError(f"cannot read the weights: {err}", where=file) from None
    problems += [Problem(f"no tensor {name}", str(directory)) for name in sorted(missing)]
    if problems:
        raise JobError(*problems[:20])


def save_weights(directory: str | Path, views: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write config.json and model.safetensors; `from_pretrained(directory)` of transformers reads them."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(views.values())).dtype).removeprefix("torch.")
    written = {**config, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    tensors = {disk_name(name): view.detach().contiguous() for name, view in views.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def memory_name(key: str) -> str:
    """`visual.x` and `model.layers.x` as named_parameters() calls them; newer names stay."""
    if key.startswith(("model.visual.", "model.language_model.", "lm_head.", "score.")):
        return key
    if key.startswith("visual."):
        return f"model.{key}"
    return "model.language_model." + key.removeprefix("model.")


def disk_name(name: str) -> str:
    """The inverse of `memory_name`."""
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1)


def _copy(view: Tensor, value: Tensor, name: str, file: Path) -> list[Problem]:
    if view.shape != value.shape:
        return [Problem(f"{name} is {list(value.shape)}, the config says {list(view.shape)}", str(file))]
    with torch.no_grad():
        view.copy_(value)
    return []
