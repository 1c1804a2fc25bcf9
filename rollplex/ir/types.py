"""Types of graph values: named dims, dtype, attached to autograd or not, dependent on the response or not.

logp    float32 [prompt, group, response] attached response
prompts Prompts [prompt]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

PROMPT, GROUP, TOKEN, RESPONSE = "prompt", "group", "token", "response"
LAYER, HIDDEN, VOCAB = "layer", "hidden", "vocab"

# The order in which dims stand in every tensor; broadcasting by name puts them back into it.
DIMS = (PROMPT, GROUP, TOKEN, RESPONSE, LAYER, HIDDEN, VOCAB)
# A dim of length one, as `keepdim=True` leaves it; it broadcasts with anything that stands in its place.
UNIT = "1"

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}

RoleKind = Literal["policy", "critic", "frozen"]
"""Sampled from and trained; trained only; neither."""
StructKind = Literal["Prompts", "Rollout", "Boundary"]


@dataclass(frozen=True)
class TensorType:
    """A tensor: its named dims in order, and what depends on it."""

    dims: tuple[str, ...]
    dtype: str = "float32"
    attached: bool = False
    response_dependent: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(self.dims)}]{_flags(self)}"


@dataclass(frozen=True)
class StructType:
    """A struct of tensors (`Prompts`, `Rollout`) or an engine's state (`Boundary`); its fields share `dims`."""

    kind: StructKind
    dims: tuple[str, ...] = (PROMPT,)
    attached: bool = False
    response_dependent: bool = False

    def __str__(self) -> str:
        return f"{self.kind} [{', '.join(self.dims)}]{_flags(self)}"


@dataclass(frozen=True)
class Effect:
    """What an update gives: no value, but theta_k+1 of a role."""

    role: str

    def __str__(self) -> str:
        return f"theta of {self.role}"


Type = TensorType | StructType | Effect

# Fields of a struct: the dims they have beyond the struct's own, and their dtype (`float` is the job's float dtype).
FIELDS: Mapping[str, Mapping[str, tuple[tuple[str, ...], str]]] = {
    "Prompts": {"tokens": ((TOKEN,), "int64"), "mask": ((TOKEN,), "bool"), "lengths": ((), "int64")},
    "Rollout": {
        "tokens": ((RESPONSE,), "int64"),
        "logprobs": ((RESPONSE,), "float"),
        "mask": ((RESPONSE,), "bool"),
        "lengths": ((), "int64"),
    },
    "Boundary": {},
}


def _flags(value: TensorType | StructType) -> str:
    return (" attached" if value.attached else "") + (" response" if value.response_dependent else "")


def field_type(struct: StructType, name: str, float_dtype: str) -> TensorType:
    """The type of one field of a struct; the tracer has already refused names that are not there."""
    extra, dtype = FIELDS[struct.kind][name]
    return TensorType((*struct.dims, *extra), float_dtype if dtype == "float" else dtype)


def with_flags(value: Type, attached: bool, response_dependent: bool) -> Type:
    """The same type with its dependence set."""
    if isinstance(value, Effect):
        return value
    return replace(value, attached=attached, response_dependent=response_dependent)


def dim_sizes(job: Any, data_parallel: int = 1) -> dict[str, int]:
    """Lengths of the workload's dims for one data-parallel rank, at their budgets; not those of a model."""
    work = job.workload
    return {
        PROMPT: math.ceil(work.prompts / data_parallel),
        GROUP: work.group,
        TOKEN: work.prompt_tokens,
        RESPONSE: work.response_tokens,
        UNIT: 1,
    }


def nbytes(value: TensorType | StructType, job: Any, data_parallel: int = 1) -> int:
    """Bytes of a value in one step on one data-parallel rank; those of a boundary are the model's to tell."""
    if isinstance(value, StructType):
        assert FIELDS[value.kind], f"the size of a {value.kind} depends on the model"
        float_dtype = float_dtype_of(job)
        return sum(nbytes(field_type(value, f, float_dtype), job, data_parallel) for f in FIELDS[value.kind])
    sizes = dim_sizes(job, data_parallel)
    return math.prod(sizes[d] for d in value.dims) * ITEM_BYTES[value.dtype]


def float_dtype_of(job: Any) -> str:
    """The dtype of log-probabilities and losses: float32, or float64 where the model itself is float64."""
    return "float64" if job.model.dtype == "float64" else "float32"
