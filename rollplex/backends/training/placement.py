"""Where every parameter of a role lies in the planned objects, and what it holds before the first iteration.

ROLE.snapshot / ROLE.weights    language parameters as the rollout engine fuses them: q, k, v together, gate, up
ROLE.vision                     tower and projector, end to end, in transformers' order
master, moments, gradients      trained parameters, language first: the flat order of the update
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
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

SCORE = "score."
"""The head of a model that ends in one number."""
PARTS: tuple[Part, ...] = ("language", "vision")
PREFIXES: dict[Part, tuple[str, ...]] = {
    "vision": ("model.visual.",),
    "language": ("model.language_model.", "lm_head.", SCORE),
}
LANGUAGE = "model.language_model."
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
INITIAL_STD = 0.02


def weight_objects(job: Job, role: str, has: Callable[[str], bool]) -> dict[Part, str]:
    """The planned objects of a role's weights in one process, of those that it `has`.

    Language weights of a trained role are `ROLE.snapshot`, those of a frozen one `ROLE.weights`; a role without a tower
    of its own reads the policy's.
    """
    language = f"{role}.snapshot" if role in job.trained else f"{role}.weights"
    tower = f"{role}.vision" if has(f"{role}.vision") else f"{job.policy}.vision"
    names: dict[Part, str] = {"language": language, "vision": tower}
    return {part: name for part, name in names.items() if has(name)}


def tensors_of(job: Job, role: str, part: Part) -> tuple[spec.Tensor, ...]:
    """The parameters of one part of a role's model, in their order in memory."""
    return tuple(t for t in model_tensors(job.spec_of(role)) if t.part == part)


def trained_tensors(job: Job, role: str) -> tuple[spec.Tensor, ...]:
    """The parameters that the update changes, in its flat order."""
    return tuple(t for part in PARTS if part not in job.roles[role].freeze for t in tensors_of(job, role, part))


def views(flat: Mapping[Part, Tensor], job: Job, role: str) -> dict[str, Tensor]:
    """Every parameter of a role's model as a view of its part's flat memory, by Hugging Face name."""
    found = split(flat["vision"], tensors_of(job, role, "vision")) if "vision" in flat else {}
    if "language" in flat:
        tensors = whole_shard(job.spec_of(role), load_facts("host")).tensors(flat["language"])
        found |= {name if name.startswith(("lm_head.", SCORE)) else f"{LANGUAGE}{name}": view for name, view in tensors}
    return found


def split(memory: Tensor, tensors: tuple[spec.Tensor, ...]) -> dict[str, Tensor]:
    """Views of flat memory in which the tensors lie end to end."""
    found, at = {}, 0
    for tensor in tensors:
        found[tensor.name] = memory[at : at + tensor.numel].view(tensor.shape)
        at += tensor.numel
    return found


@torch.no_grad()
def fill(into: Mapping[str, Tensor], job: Job, role: str) -> None:
    """Initial values of a role: those of its directory, or numbers drawn from `run.seed`.

    A trained role may begin with a directory that has no scalar head: the head is drawn.
    """
    directory, drawing = initial_weights(job, role), dict(into)
    if directory is not None:
        found = stored_shapes(directory)
        drawing = {name: view for name, view in into.items() if name not in found and may_draw(job, role, name)}
        load_weights(directory, {name: view for name, view in into.items() if name not in drawing})
    for name, view in drawing.items():
        view.copy_(drawn(name, view.shape, job.run.seed))


def initial_weights(job: Job, role: str) -> str | None:
    """The directory that a role's weights begin with: its own, else for the job's model that of the run."""
    own = job.roles[role]
    return own.weights or (job.run.weights if own.model is None else None)


def may_draw(job: Job, role: str, name: str) -> bool:
    """Whether a parameter may be missing in a role's directory: the new head of a role that learns."""
    return name.startswith(SCORE) and role in job.trained


def drawn(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """A tensor as transformers initialises it: normal, norms one, biases zero; each from a generator of its own."""
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * INITIAL_STD


# ---- checked before any process starts


def check_weights(job: Job) -> None:
    """Refuse a weights directory that lacks a parameter or has one of another shape; JobError lists them."""
    problems = [p for role in job.roles for p in _mismatches(job, role)]
    if problems:
        raise JobError(*dict.fromkeys(problems[:20]))


def stored_shapes(directory: str) -> dict[str, tuple[int, ...]]:
    """Shapes by parameter name in the safetensors files of a directory; JobError where there are none."""
    path = Path(directory)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not files:
        raise JobError("no *.safetensors here", where=path, hint="`weights` names a Hugging Face model directory")
    return {name: shape for file in files for name, shape in _shapes(file)}


def _mismatches(job: Job, role: str) -> Iterator[Problem]:
    where = initial_weights(job, role)
    if where is None:
        return
    shapes = stored_shapes(where)
    for tensor in model_tensors(job.spec_of(role)):
        got = shapes.get(tensor.name)
        if got is None and not may_draw(job, role, tensor.name):
            yield Problem(f"no weight {tensor.name}", where, _lacking(role, tensor.name))
        elif got not in (None, tensor.shape):
            yield Problem(f"{tensor.name} is {list(got or ())}, the model needs {list(tensor.shape)}", where)


def _lacking(role: str, name: str) -> str:
    if name.startswith(SCORE):
        return f"name the reward model's directory: roles.{role}.weights"
    return "take the weights of the model that the job names"


def _shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                yield memory_name(key), tuple(opened.get_slice(key).get_shape())
    except (SafetensorError, OSError) as err:
        raise JobError(f"cannot read the weights: {err}", where=file, hint="copy or make the file again") from None


def config_of(job: Job, role: str | None = None) -> dict[str, Any]:
    """The config.json of a role's model, or of the job's; JobError for a registry model, which has no files to run.

    A copy: transformers writes into what it is given, and a plan must not change because it was run.
    """
    own = job.roles[role].model if role else None
    model = own or job.model
    if model.config is None:
        raise JobError(
            f"the model {model.name} is known by its sizes only",
            where=f"roles.{role}.model.name" if own else "model.name",
            hint="name a Hugging Face directory or a config.json to run it",
        )
    return deepcopy(model.config)
