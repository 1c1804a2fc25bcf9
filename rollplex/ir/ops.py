"""The ops of the graph: one table, `OPS`; a row says what an op takes, what it gives, and what may be done with it.

rollout   = actor.generate(prompts, n=n)             generate("actor", %prompts, n=8)
ref_logp  = reference.logprobs(prompts, rollout)     logprobs("reference", %prompts, %rollout)
loss      = rx.masked_mean(x, rollout.mask)          masked_mean(%x, %rollout_mask)

A function below is three things: what the user calls, the target of the fx node it records, and, for tensor ops, what
the runtime executes. Called with traced values it records itself; called with tensors it computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from rollplex.ir.errors import GraphError
from rollplex.ir.types import GROUP, PROMPT, RESPONSE, UNIT, Effect, StructType, TensorType, Type, field_type

Separable = Literal["group", "sum", "no"]
Returns = Literal["scores", "prompts", "sample_prompts", "rollout"]


@dataclass(frozen=True)
class Op:
    """One row: `rule(bound arguments, float dtype)` gives the result's type, its nodes replaced by their types.

    `separable`: "group" when the result for a prompt group needs only that group; "sum" when it is a sum over groups
    (up to a factor known before the forward); "no" otherwise. `tensors` are the arguments of rx's own maths that must
    be traced tensors; when there are two, they are aligned by named dims.
    """

    fn: Callable[..., Any]
    rule: Callable[[Mapping[str, Any], str], Type]
    calls_model: bool = False
    separable: Separable = "no"
    differentiable: bool = False
    pure: bool = False
    tensors: tuple[str, ...] = ()
    struct: str | None = None

    @property
    def name(self) -> str:
        """The name in a plan: `rx.masked_mean`."""
        return f"rx.{self.fn.__name__}"

    @property
    def signature(self) -> inspect.Signature:
        """Parameters of the op, as nodes carry them."""
        return inspect.signature(self.fn)


# ---------------------------------------------------------------------------------------------- model and host calls


def generate(role: str, prompts: Any, *, n: int) -> Any:
    """Sample n responses to every prompt from theta_k.

    Before: prompts [prompt]. After: a Rollout [prompt, group]; tokens, logprobs and mask [prompt, group, response],
    lengths [prompt, group]. It is where values start to depend on the response.
    """
    raise AssertionError("generate is executed by a backend")


def logprobs(role: str, prompts: Any, rollout: Any) -> Any:
    """Log-probabilities of the response tokens under a role's model, natural logarithm.

    Before: prompts [prompt] (or a boundary), rollout [prompt, group]. After: [prompt, group, response], attached to
    autograd if the role is trained. The compiler splits it: kv = prefix(role, prompts); suffix(role, kv, rollout).
    """
    raise AssertionError("logprobs is executed by a backend")


def prefix(role: str, prompts: Any) -> Any:
    """Run a role's model over all but the last token of every prompt.

    Before: prompts [prompt]. After: a Boundary [prompt]: the keys and values of every layer.
    """
    raise AssertionError("prefix is executed by a backend")


def suffix(role: str, boundary: Any, rollout: Any) -> Any:
    """Run the last prompt token and the response on top of a boundary.

    Before: boundary [prompt], rollout [prompt, group]. After: log-probabilities [prompt, group, response].
    """
    raise AssertionError("suffix is executed by a backend")


def host(fn: str, *args: Any, returns: Returns = "scores") -> Any:
    """Call the user's Python function on the host; `fn` is a parameter of the algorithm or `module:function`.

    After: `scores` [prompt, group]; `prompts` [prompt]; `sample_prompts` [prompt, group]; `rollout` [prompt, group].
    """
    raise AssertionError("host is executed by the controller")


def update(role: str, loss: Any) -> Any:
    """Backward from a scalar loss and one optimizer step of the role: theta_k becomes theta_k+1."""
    raise AssertionError("update is executed by the runtime")


def field(value: Any, name: str) -> Any:
    """One tensor of a struct: `rollout.mask`."""
    return value[name] if isinstance(value, Mapping) else getattr(value, name)


# ------------------------------------------------------------------------------------------------------- tensor ops


def group_normalize(x: Any, n: int, eps: float = 1e-6) -> Any:
    """Normalise over the n responses of every prompt: (x - mean) / (std + eps), std with n - 1 (GRPO's advantage).

    Before and after: [prompt, group, ..]. Source: DeepSeekMath, arXiv 2402.03300, section 4.1.
    """
    if has_torch_function((x,)):
        return handle_torch_function(group_normalize, (x,), x, n, eps=eps)
    assert tuple(x.shape[1:2]) == (n,), f"group_normalize over {n} responses of a tensor {tuple(x.shape)}"
    return (x - x.mean(dim=1, keepdim=True)) / (x.std(dim=1, keepdim=True) + eps)


def masked_sum(x: Any, mask: Any) -> Any:
    """Sum of x where the mask holds. Before: two tensors of one shape. After: a scalar []."""
    if has_torch_function((x, mask)):
        return handle_torch_function(masked_sum, (x, mask), x, mask)
    # `where` rather than a product: a padded position may hold inf or nan, and 0 * inf is nan.
    return torch.where(mask, x, 0).sum() if mask.dtype is torch.bool else (x * mask).sum()


def masked_mean(x: Any, mask: Any) -> Any:
    """Mean of x where the mask holds, over all prompts and responses of the step: one token, one vote.

    Before: two tensors of one shape, of the whole step. After: a scalar []: masked_sum(x, mask) / mask_count(mask).
    """
    if has_torch_function((x, mask)):
        return handle_torch_function(masked_mean, (x, mask), x, mask)
    x, mask = torch.broadcast_tensors(x, mask)
    return portion(masked_sum(x, mask), mask_count(mask))


def mask_count(mask: Tensor) -> Tensor:
    """How much a mask lets through, at least 1: the divisor of a masked mean. Before: [..]. After: a scalar []."""
    total = mask.sum()
    return torch.where(total == 0, torch.ones_like(total), total)


def rows(x: Tensor) -> Tensor:
    """The number of prompts of a tensor [prompt, ..] of the whole step. After: a scalar []."""
    return torch.tensor(x.shape[0])


def portion(x: Any, count: Tensor) -> Any:
    """x divided by a count, in x's own dtype: what one prompt group contributes to a mean. Before and after: [..]."""
    return x / count.to(x.dtype) if isinstance(x, Tensor) else x / count.item()


# ------------------------------------------------------------------------------------------------------------- types


def _rollout_of(bound: Mapping[str, Any], _float: str) -> Type:
    return StructType("Rollout", (PROMPT, GROUP))


def _logprobs_of(_bound: Mapping[str, Any], float_dtype: str) -> Type:
    return TensorType((PROMPT, GROUP, RESPONSE), float_dtype)


def _boundary_of(bound: Mapping[str, Any], _float: str) -> Type:
    return StructType("Boundary", bound["prompts"].dims)


def _host_of(bound: Mapping[str, Any], float_dtype: str) -> Type:
    match bound["returns"]:
        case "prompts":
            return StructType("Prompts", (PROMPT,))
        case "sample_prompts":
            return StructType("Prompts", (PROMPT, GROUP))
        case "rollout":
            return StructType("Rollout", (PROMPT, GROUP))
        case _:
            return TensorType((PROMPT, GROUP), float_dtype)


def _field_of(bound: Mapping[str, Any], float_dtype: str) -> Type:
    return field_type(bound["value"], bound["name"], float_dtype)


def _group_normalized(bound: Mapping[str, Any], _float: str) -> Type:
    x = bound["x"]
    if x.dims[:2] != (PROMPT, GROUP):
        raise GraphError(
            f"group_normalize needs [prompt, group, ..], this value is [{', '.join(x.dims)}]",
            hint="normalise the score of a host function before reducing it",
        )
    return TensorType(x.dims, x.dtype)


def _masked(bound: Mapping[str, Any], float_dtype: str) -> Type:
    x, mask = bound["x"], bound["mask"]
    missing = [d for d in x.dims if d != UNIT and d not in mask.dims]
    if missing:
        raise GraphError(
            f"the mask [{', '.join(mask.dims)}] has no dim {', '.join(missing)} of the value [{', '.join(x.dims)}]",
            hint="use a mask of response positions such as rollout.mask, or .mean() where nothing is masked",
        )
    return TensorType((), x.dtype if x.dtype.startswith(("float", "bfloat")) else float_dtype)


def _counted(_bound: Mapping[str, Any], float_dtype: str) -> Type:
    return TensorType((), float_dtype)


def _updated(bound: Mapping[str, Any], _float: str) -> Type:
    loss = bound["loss"]
    if not isinstance(loss, TensorType) or loss.dims:
        dims = ", ".join(loss.dims) if isinstance(loss, TensorType) else str(loss)
        raise GraphError(
            f"the loss must be a scalar, this one is [{dims}]",
            hint="reduce it: rx.masked_mean(loss, rollout.mask), or .mean() for a value without response positions",
        )
    return Effect(bound["role"])


_ROWS = (
    Op(generate, _rollout_of, calls_model=True, separable="group", struct="Rollout"),
    Op(logprobs, _logprobs_of, calls_model=True, separable="group", differentiable=True),
    Op(prefix, _boundary_of, calls_model=True, separable="group", differentiable=True, struct="Boundary"),
    Op(suffix, _logprobs_of, calls_model=True, separable="group", differentiable=True),
    Op(host, _host_of),
    Op(update, _updated),
    Op(field, _field_of, separable="group", pure=True),
    Op(group_normalize, _group_normalized, separable="group", differentiable=True, pure=True, tensors=("x",)),
    Op(masked_mean, _masked, separable="sum", differentiable=True, pure=True, tensors=("x", "mask")),
    Op(masked_sum, _masked, separable="sum", differentiable=True, pure=True, tensors=("x", "mask")),
    Op(mask_count, _counted, pure=True),
    Op(rows, _counted, pure=True),
    Op(portion, _counted, pure=True),
)

OPS: Mapping[str, Op] = {row.name: row for row in _ROWS}
OP_OF: Mapping[Callable[..., Any], Op] = {row.fn: row for row in _ROWS}

STRUCT_OF_RETURNS: Mapping[str, str | None] = {
    "scores": None,
    "prompts": "Prompts",
    "sample_prompts": "Prompts",
    "rollout": "Rollout",
}
