"""The ops of the graph: one table, `OPS`; a row says what an op takes, what it gives, and what may be done with it.

rollout   = actor.generate(prompts, n=n)             generate("actor", %prompts, n=8)
ref_logp  = reference.logprobs(prompts, rollout)     logprobs("reference", %prompts, %rollout)
loss      = rx.masked_mean(x, rollout.mask)          masked_mean(%x, %rollout_mask)

A function is three things: what the user calls, the target of the fx node it records, and, for the tensor maths of
tensor_ops.py, what the runtime executes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollplex.ir.errors import GraphError
from rollplex.ir.tensor_ops import (
    at_end,
    gae,
    group_normalize,
    mask_count,
    masked_mean,
    masked_sum,
    portion,
    rows,
    sequence_mean,
    sequence_sum,
)
from rollplex.ir.types import GROUP, PROMPT, RESPONSE, UNIT, Effect, StructType, TensorType, Type, field_type

Separable = Literal["group", "sum", "no"]
Returns = Literal["scores", "prompts", "sample_prompts", "rollout"]
HISTORY = "history"
"""What `rx.observe` returns: the history it was given, the responses to it, and what the environment shows then."""
Head = Literal["logprobs", "values", "score"]


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


def values(role: str, prompts: Any, rollout: Any) -> Any:
    """A critic's value of the state in which each response token is chosen: prompt and response before that token.

    Before: prompts [prompt] (or a boundary), rollout [prompt, group]. After: [prompt, group, response], attached to
    autograd if the role is trained. It is split as `logprobs` is; the model ends in one number instead of logits.
    """
    raise AssertionError("values is executed by a backend")


def score(role: str, prompts: Any, rollout: Any) -> Any:
    """A reward model's score of every response, read at its last token.

    Before: prompts [prompt] (or a boundary), rollout [prompt, group]. After: [prompt, group]. It is split as `logprobs`
    is; the model ends in one number instead of logits.
    """
    raise AssertionError("score is executed by a backend")


def prefix(role: str, prompts: Any, extends: Any = None) -> Any:
    """Run a role's model over all but the last token of every prompt; on a history, over what is new in it.

    Before: prompts [prompt]. After: a Boundary [prompt]: the keys and values of every layer. Before: a history [prompt,
    group] and the boundary of the history that it extends. After: a Boundary [prompt, group]: one more piece.
    """
    raise AssertionError("prefix is executed by a backend")


def suffix(role: str, boundary: Any, rollout: Any, *, head: Head = "logprobs") -> Any:
    """Run the last prompt token and the response on top of a boundary.

    Before: boundary [prompt], with all pieces that it extends, rollout [prompt, group]. After: what the head gives:
    log-probabilities or values [prompt, group, response], or scores [prompt, group].
    """
    raise AssertionError("suffix is executed by a backend")


def host(fn: str, *args: Any, returns: str = "scores") -> Any:
    """Call the user's Python function on the host; `fn` is a parameter of the algorithm or `module:function`.

    After: `scores`, `sample_prompts`, `history` and `rollout` [prompt, group]; `prompts` [prompt].
    """
    raise AssertionError("host is executed by the controller")


def update(role: str, loss: Any) -> Any:
    """Backward from a scalar loss and one optimizer step of the role: theta_k becomes theta_k+1."""
    raise AssertionError("update is executed by the runtime")


def field(value: Any, name: str) -> Any:
    """One tensor of a struct: `rollout.mask`."""
    return value[name] if isinstance(value, Mapping) else getattr(value, name)


# ------------------------------------------------------------------------------------------------------------- types


def _rollout_of(bound: Mapping[str, Any], _float: str) -> Type:
    return StructType("Rollout", (PROMPT, GROUP))


def _tokens_of(_bound: Mapping[str, Any], float_dtype: str) -> Type:
    return TensorType((PROMPT, GROUP, RESPONSE), float_dtype)


def _responses_of(_bound: Mapping[str, Any], float_dtype: str) -> Type:
    return TensorType((PROMPT, GROUP), float_dtype)


def _suffix_of(bound: Mapping[str, Any], float_dtype: str) -> Type:
    return (_responses_of if bound["head"] == "score" else _tokens_of)(bound, float_dtype)


def _boundary_of(bound: Mapping[str, Any], _float: str) -> Type:
    return StructType("Boundary", bound["prompts"].dims)


def _host_of(bound: Mapping[str, Any], float_dtype: str) -> Type:
    match bound["returns"]:
        case "prompts":
            return StructType("Prompts", (PROMPT,))
        case "sample_prompts" | "history":
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


def _along_response(bound: Mapping[str, Any], _float: str) -> TensorType:
    """The value of a function of two tensors along the response, which its mask must have."""
    x, mask = bound["x"], bound["mask"]
    if mask.dims[-1:] != (RESPONSE,):
        raise GraphError(
            f"the mask [{', '.join(mask.dims)}] has no response positions", hint="use a mask such as rollout.mask"
        )
    return TensorType(mask.dims, x.dtype)


def _sequences(bound: Mapping[str, Any], float_dtype: str) -> Type:
    tokens = _along_response(bound, float_dtype)
    return TensorType(tokens.dims[:-1], tokens.dtype)


def _advantages(bound: Mapping[str, Any], _float: str) -> Type:
    rewards, values, mask = bound["rewards"], bound["values"], bound["mask"]
    if values.dims[-1:] != (RESPONSE,) or values.dims != mask.dims:
        raise GraphError(
            f"gae needs a value of every response token, these are [{', '.join(values.dims)}]",
            hint="rx.gae(score, critic.values(prompts, rollout), rollout.mask)",
        )
    if rewards.dims[-1:] not in ((RESPONSE,), (UNIT,)):
        raise GraphError(
            f"gae needs rewards of every token, or scores of every response, these are [{', '.join(rewards.dims)}]",
            hint="rx.gae(score, values, rollout.mask), or rx.at_end(score, rollout.mask) - kl * (..)",
        )
    return TensorType(values.dims, values.dtype)


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
    Op(logprobs, _tokens_of, calls_model=True, separable="group", differentiable=True),
    Op(values, _tokens_of, calls_model=True, separable="group", differentiable=True),
    Op(score, _responses_of, calls_model=True, separable="group", differentiable=True),
    Op(prefix, _boundary_of, calls_model=True, separable="group", differentiable=True, struct="Boundary"),
    Op(suffix, _suffix_of, calls_model=True, separable="group", differentiable=True),
    Op(host, _host_of),
    Op(update, _updated),
    Op(field, _field_of, separable="group", pure=True),
    Op(group_normalize, _group_normalized, separable="group", differentiable=True, pure=True, tensors=("x",)),
    Op(masked_mean, _masked, separable="sum", differentiable=True, pure=True, tensors=("x", "mask")),
    Op(masked_sum, _masked, separable="sum", differentiable=True, pure=True, tensors=("x", "mask")),
    Op(sequence_sum, _sequences, separable="group", differentiable=True, pure=True, tensors=("x", "mask")),
    Op(sequence_mean, _sequences, separable="group", differentiable=True, pure=True, tensors=("x", "mask")),
    Op(at_end, _along_response, separable="group", differentiable=True, pure=True, tensors=("x", "mask")),
    Op(gae, _advantages, separable="group", pure=True, tensors=("rewards", "values", "mask")),
    Op(mask_count, _counted, pure=True),
    Op(rows, _counted, pure=True),
    Op(portion, _counted, pure=True),
)

OPS: Mapping[str, Op] = {row.name: row for row in _ROWS}
OP_OF: Mapping[Callable[..., Any], Op] = {row.fn: row for row in _ROWS}

MODEL_CALLS: Mapping[Head, Callable[..., Any]] = {"logprobs": logprobs, "values": values, "score": score}
"""Whole calls of a model on prompts and responses, by what its head gives; prefix-split takes them apart."""

STRUCT_OF_RETURNS: Mapping[str, str | None] = {
    "scores": None,
    "prompts": "Prompts",
    "sample_prompts": "Prompts",
    HISTORY: "Prompts",
    "rollout": "Rollout",
}
