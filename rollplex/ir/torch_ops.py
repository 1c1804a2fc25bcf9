"""The closed list of torch operations that an algorithm may use: pure, deterministic, one tensor out.

A plan carries names from this list and a worker executes nothing else. The kind says how named dims go through:
`pointwise` broadcasts by name, `reduction` and `scan` work along `dim`, `shape` only rearranges.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

OpKind = Literal["pointwise", "reduction", "scan", "shape"]


@dataclass(frozen=True)
class TorchOp:
    """One torch operation under the name a plan uses: `torch.exp`, `Tensor.clamp`, `operator.mul`."""

    name: str
    kind: OpKind
    differentiable: bool
    run: Callable[..., torch.Tensor]


_POINTWISE = """abs absolute neg negative exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sigmoid logit
    sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh erf erfc lgamma digamma relu sgn sign
    trunc frac floor ceil round clamp clamp_min clamp_max clip minimum maximum fmin fmax add sub subtract
    mul multiply div divide true_divide pow float_power lerp where addcmul addcdiv logaddexp logaddexp2
    fmod remainder copysign atan2 hypot xlogy masked_fill nan_to_num detach clone positive"""
_UNDIFFERENTIABLE = """eq ne lt le gt ge logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_xor bitwise_not isnan isinf isfinite zeros_like ones_like full_like"""
_CASTS = "float double half bfloat16 to"
_INTEGER_CASTS = "bool int long"
_FUNCTIONAL = "softplus logsigmoid silu gelu relu elu leaky_relu mish hardtanh sigmoid tanh"
_REDUCTIONS = "sum mean prod std var amax amin logsumexp nansum nanmean"
_COUNTS = "argmax argmin any all count_nonzero"
_SCANS = "cumsum cumprod logcumsumexp softmax log_softmax flip"
_SHAPES = "unsqueeze squeeze"
_OPERATORS = "add sub mul truediv mod pow neg pos abs"
_LOGIC = "eq ne lt le gt ge and_ or_ xor invert"


def _rows(names: str, kind: OpKind, differentiable: bool = True) -> list[TorchOp]:
    """Rows for the function `torch.x` and the method `Tensor.x` of each name, where torch has them."""
    spaces: tuple[tuple[str, Any], ...] = (("torch", torch), ("Tensor", torch.Tensor))
    return [
        TorchOp(f"{prefix}.{name}", kind, differentiable and name != "detach", getattr(space, name))
        for name in names.split()
        for prefix, space in spaces
        if hasattr(space, name)
    ]


def _table() -> dict[str, TorchOp]:
    functional = torch.nn.functional
    rows = [
        *_rows(_POINTWISE, "pointwise"),
        *_rows(_UNDIFFERENTIABLE, "pointwise", differentiable=False),
        *_rows(_REDUCTIONS, "reduction"),
        *_rows(_COUNTS, "reduction", differentiable=False),
        *_rows(_SCANS, "scan"),
        *_rows(_SHAPES, "shape"),
        *(TorchOp(f"Tensor.{n}", "pointwise", True, getattr(torch.Tensor, n)) for n in _CASTS.split()),
        *(TorchOp(f"Tensor.{n}", "pointwise", False, getattr(torch.Tensor, n)) for n in _INTEGER_CASTS.split()),
        *(TorchOp(f"torch.nn.functional.{n}", "pointwise", True, getattr(functional, n)) for n in _FUNCTIONAL.split()),
        *(TorchOp(f"operator.{n}", "pointwise", True, getattr(operator, n)) for n in _OPERATORS.split()),
        *(TorchOp(f"operator.{n}", "pointwise", False, getattr(operator, n)) for n in _LOGIC.split()),
        TorchOp("operator.getitem", "shape", True, operator.getitem),
    ]
    return {row.name: row for row in rows}


TORCH_OPS: Mapping[str, TorchOp] = _table()
_NAME_OF_FUNCTION: Mapping[Any, str] = {
    row.run: name for name, row in TORCH_OPS.items() if not name.startswith("Tensor.")
}

# Operations that people reach for, and what to write instead.
INSTEAD: Mapping[str, str] = {
    "item": "keep it as a tensor, or make it a parameter of the algorithm",
    "tolist": "keep it as a tensor; lists belong into a host function",
    "numpy": "keep it as a tensor, or compute it in a host function: rx.host(fn)(prompts, rollout)",
    "backward": "actor.update(loss) runs backward",
    "max": "torch.maximum(a, b) for two values, torch.amax(x, dim) for one",
    "min": "torch.minimum(a, b) for two values, torch.amin(x, dim) for one",
    "median": "rank statistics belong into a host function",
    "sort": "rank statistics belong into a host function",
    "topk": "rank statistics belong into a host function",
    "matmul": "write products of named dims as (a * b).sum(dim)",
    "einsum": "write products of named dims as (a * b).sum(dim)",
    "floordiv": "torch.floor(a / b), which has a derivative",
    "floor_divide": "torch.floor(a / b), which has a derivative",
    "heaviside": "torch.where(x > 0, 1.0, 0.0)",
    "size": "lengths are fixed by the job; use the parameter n, or a masked op",
    "shape": "lengths are fixed by the job; use the parameter n, or a masked op",
    "ndim": "lengths are fixed by the job; use the parameter n, or a masked op",
    "dim": "lengths are fixed by the job; use the parameter n, or a masked op",
    "numel": "rx.masked_mean(x, mask) divides by the number of response tokens",
    "view": "dims are named here and broadcast by name; reduce with x.sum(dim)",
    "reshape": "dims are named here and broadcast by name; reduce with x.sum(dim)",
    "expand": "dims are named here and broadcast by name: write a * b",
    "cuda": "the job says where things run",
    "cpu": "the job says where things run",
    "norm": "torch.sqrt((x * x).sum(dim))",
    "device": "the job says where things run",
}
_RANDOM = ("rand", "randn", "bernoulli", "multinomial", "normal", "dropout", "uniform", "poisson")


def instead_of(name: str) -> str:
    """What to write instead of a torch operation that is not in the list."""
    plain = name.rsplit(".", 1)[-1]
    if plain in INSTEAD:
        return INSTEAD[plain]
    if any(plain.startswith(r) for r in _RANDOM):
        return "random numbers would make two schedules of one step differ; draw them in a host function"
    if plain.endswith("_"):
        return f"values are never changed in place here: use `{plain[:-1]}`"
    return "use a pointwise op, a reduction or a masked op of torch, or a host function: rx.host(fn)(prompts, rollout)"


def torch_op_name(kind: str, target: Any) -> str | None:
    """The name of an fx call in the list, or None when it is not there."""
    if kind == "call_method":
        name = f"Tensor.{target}"
        return name if name in TORCH_OPS else None
    return _NAME_OF_FUNCTION.get(target)


def reduced_dim(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The dims that a reduction or a scan works along; None for all. The bool of `std(x, False)` is not a dim."""
    second = args[1] if len(args) > 1 else None
    dim = kwargs.get("dim", kwargs.get("dims", second))
    if isinstance(dim, bool) or dim is None:
        return None
    return (int(dim),) if isinstance(dim, int) else tuple(int(d) for d in dim)
