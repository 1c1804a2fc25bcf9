"""Where every parameter lies in the planned objects, and what it holds before the first iteration.

ROLE.snapshot / ROLE.weights    language parameters as the rollout engine fuses them: q, k, v together, gate, up
ROLE.vision                     tower and projector, end to end, in transformers' order
master, moments, gradients      trained parameters, language first: the flat order of the update
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollplex.backends.facts import load_facts
from rollplex.backends.shard import whole_shard
from rollplex.backends.training.weights import load_weights, memory_name
from rollplex.ir import spec
from rollplex.ir.errors import JobError, Problem
from rollplex.ir.job import Job
from rollplex.ir.spec import Part
from rollplex.ir.tensors import model_tensors

PARTS: tuple[Part, ...] = ("language", "vision")
PREFIXES: dict[Part, tuple[str, ...]] = {
    "vision": ("model.visual.",),
    "language": ("model.language_model.", "lm_head."),
}
LANGUAGE = "model.language_model."
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
INITIAL_STD = 0.02


def weight_objects(job: Job, role: str, has: Callable[[str], bool]) -> dict[Part, str]:
    """The planned objects of a role's weights in one process, of those that it `has`.

    The policy's language weights are `ROLE.snapshot`, those of a frozen role `ROLE.weights`; a role without a tower of
    its own reads the policy's.
    """
    language = f"{role}.snapshot" if role == job.policy else f"{role}.weights"
    tower = f"{role}.vision" if has(f"{role}.vision") else f"{job.policy}.vision"
    names: dict[Part, str] = {"language": language, "vision": tower}
    return {part: name for part, name in names.items() if has(name)}


def tensors_of(job: Job, part: Part) -> tuple[spec.Tensor, ...]:
    """The parameters of one part, in their order in memory."""
    return tuple(t for t in model_tensors(job.spec) if t.part == part)


def trained_tensors(job: Job, role: str) -> tuple[spec.Tensor, ...]:
    """The parameters that the update changes, in its flat order."""
    return tuple(t for part in PARTS if part not in job.roles[role].freeze for t in tensors_of(job, part))


def views(flat: Mapping[Part, Tensor], job: Job) -> dict[str, Tensor]:
    """Every parameter as a view of its part's flat memory, by Hugging Face name."""
    found = split(flat["vision"], tensors_of(job, "vision")) if "vision" in flat else {}
    if "language" in flat:
        tensors = whole_shard(job.spec, load_facts("host")).tensors(flat["language"])
        found |= {name if name.startswith("lm_head.") else f"{LANGUAGE}{name}": view for name, view in tensors}
    return found


def split(memory: Tensor, tensors: tuple[spec.Tensor, ...]) -> dict[str, Tensor]:
    """Views of flat memory in which the tensors lie end to end."""
    found, at = {}, 0
    for tensor in tensors:
        found[tensor.name] = memory[at : at + tensor.numel].view(tensor.shape)
        at += tensor.numel
    return found


@torch.no_grad()
def fill(into: Mapping[str, Tensor], job: Job) -> None:
    """Initial values: those of the directory `run.weights`, or numbers drawn from `run.seed`."""
    if job.run.weights is not None:
        load_weights(job.run.weights, into)
        return
    for name, view in into.items():
        view.copy_(drawn(name, view.shape, job.run.seed))


def drawn(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """A tensor as transformers initialises it: normal, norms one, biases zero; each from a generator of its own."""
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * INITIAL_STD


# ---- checked before any process starts


def check_weights(job: Job) -> None:
    """Refuse a weights directory that lacks a parameter or has one of another shape; JobError lists them."""
    if job.run.weights is None:
        return
    path = Path(job.run.weights)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not files:
        raise JobError("no *.safetensors here", where=path, hint="run.weights names a Hugging Face model directory")
    shapes = {name: shape for file in files for name, shape in _shapes(file)}
    problems = list(_mismatches(job, shapes))
    if problems:
        raise JobError(*problems[:20])


def _mismatches(job: Job, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
    where = str(job.run.weights)
    for tensor in model_tensors(job.spec):
        got = shapes.get(tensor.name)
        if got is None:
            yield Problem(f"no weight {tensor.name}", where, "take the weights of the model that the job names")
        elif got != tensor.shape:
            yield Problem(f"{tensor.name} is {list(got)}, the model needs {list(tensor.shape)}", where)


def _shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                yield memory_name(key), tuple(opened.get_slice(key).get_shape())
    except (SafetensorError, OSError) as err:
        raise JobError(f"cannot read the weights: {err}", where=file, hint="copy or make the file again") from None


def config_of(job: Job) -> dict[str, Any]:
    """The model's config.json; JobError when the job names a registry model, which has no files to run."""
    if job.model.config is None:
        raise JobError(
            f"the model {job.model.name} is known by its sizes only",
            where="model.name",
            hint="name a Hugging Face directory or a config.json to run it",
        )
    return job.model.config
