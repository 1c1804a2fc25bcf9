"""Roles as the algorithm sees them while it is traced: methods of models record ops, `rx.host` records host calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from rollplex.ir import graph as graphs
from rollplex.ir import ops
from rollplex.ir.errors import Loc
from rollplex.ir.ops import Returns
from rollplex.ir.tracing import Recorder, Value, closest
from rollplex.ir.types import RoleKind

_USAGE = {
    "generate": "rollout = actor.generate(prompts, n=n)",
    "logprobs": "logp = actor.logprobs(prompts, rollout)",
    "values": "values = critic.values(prompts, rollout)",
    "score": "score = judge.score(prompts, rollout)",
    "prefix": "kv = actor.prefix(prompts)",
    "suffix": "logp = actor.suffix(kv, rollout)",
    "update": "actor.update(loss)",
}


@dataclass(eq=False)
class Role:
    """A parameter without a default: a model once one of its methods is called, a host function inside `rx.host`."""

    name: str
    recorder: Recorder
    kind: RoleKind | None = None
    uses: dict[str, Loc] = field(default_factory=dict)

    @property
    def misuse(self) -> str:
        """What to write when the handle itself stands where a value should."""
        name = self.name
        return f"call a model's method, {name}.logprobs(..), or a host function, rx.host({name})(prompts, rollout)"

    def __repr__(self) -> str:
        return f"`{self.name}`"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.recorder.refuse(f"a role has no `.{name}`: `{self.name}.{name}`", closest(name, _USAGE))

    def __call__(self, *_args: object, **_kwargs: object) -> Any:
        self.recorder.refuse(f"`{self.name}` is called like a function", f"rx.host({self.name})(prompts, rollout)")

    def generate(self, prompts: Any, n: int) -> Value:
        """Sample n responses a prompt; a Rollout."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            self.recorder.refuse(f"n must be a positive whole number of responses, it is {n!r}", "n=8")
        if self.kind in ("frozen", "critic"):
            why = "is frozen" if self.kind == "frozen" else "is trained only"
            self.recorder.refuse(f"`{self.name}` {why} and cannot generate", "generate from the policy")
        self._struct(prompts, "Prompts", "generate")
        if self.recorder.responds(prompts) and not graphs.observed(prompts.node):
            self.recorder.refuse(
                "generate from prompts that depend on a response of this step",
                "generate from the prompts of the data set, or from rx.observe(environment)(prompts, rollout)",
            )
        return self._record(ops.generate, prompts, n=n)

    def logprobs(self, prompts: Any, rollout: Any) -> Value:
        """Log-probabilities of the response tokens; `prompts` may be a boundary made by `prefix`."""
        return self._call("logprobs", prompts, rollout)

    def values(self, prompts: Any, rollout: Any) -> Value:
        """A value of every response token, before it is chosen; attached when the role is trained."""
        return self._call("values", prompts, rollout)

    def score(self, prompts: Any, rollout: Any) -> Value:
        """One score of every response, from a reward model."""
        return self._call("score", prompts, rollout)

    def prefix(self, prompts: Any) -> Value:
        """The boundary of the prompts: everything before the first response position."""
        self._struct(prompts, "Prompts", "prefix")
        if self.recorder.responds(prompts) and not graphs.observed(prompts.node):
            name = self.recorder.name_of(prompts)
            self.recorder.refuse(
                f"a prefix of `{name}`, which depends on the response",
                f"use {self.name}.logprobs({name}, ..): it runs whole, after the rollout",
            )
        return self._record(ops.prefix, prompts)

    def suffix(self, boundary: Any, rollout: Any) -> Value:
        """Log-probabilities of the response tokens on top of a boundary of the same role."""
        return self._suffix(boundary, rollout)

    def update(self, loss: Any) -> Value:
        """One optimizer step of this role."""
        if self.kind == "frozen":
            self.recorder.refuse(
                f"`{self.name}` is frozen and cannot be updated", "update the policy, or declare the role rx.Policy"
            )
        if not isinstance(loss, Value) or loss.node.meta["struct"] is not None:
            self.recorder.refuse(f"the loss of `{self.name}` is not a tensor", "rx.masked_mean(.., rollout.mask)")
        update = self._record(ops.update, loss)
        self.recorder.updated[self.name] = graphs.loc(update.node)
        return update

    def _call(self, head: ops.Head, prompts: Any, rollout: Any) -> Value:
        """A call on prompts, or its suffix where they are a boundary."""
        if isinstance(prompts, Value) and prompts.node.meta["struct"] == "Boundary":
            return self._suffix(prompts, rollout, **({} if head == "logprobs" else {"head": head}))
        self._struct(prompts, "Prompts", head)
        self._struct(rollout, "Rollout", head)
        return self._record(ops.MODEL_CALLS[head], prompts, rollout)

    def _suffix(self, boundary: Any, rollout: Any, **head: str) -> Value:
        self._struct(boundary, "Boundary", "suffix")
        self._struct(rollout, "Rollout", "suffix")
        maker = graphs.role(boundary.node)
        if maker != self.name:
            self.recorder.refuse(f"a suffix of `{self.name}` on a boundary of `{maker}`", f"use {maker}.suffix(..)")
        self.uses.setdefault(head.get("head", "logprobs"), self.recorder.here())
        return self._record(ops.suffix, boundary, rollout, **head)

    def _struct(self, value: Any, struct: str, method: str) -> None:
        if not isinstance(value, Value) or value.node.meta["struct"] != struct:
            shown = f"`{self.recorder.name_of(value)}`" if isinstance(value, Value) else repr(value)
            self.recorder.refuse(f"{self.name}.{method} takes {struct}, not {shown}", _USAGE[method])

    def _record(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        value = self.recorder.record(fn, self.name, *args, **kwargs)
        self.uses.setdefault(fn.__name__, graphs.loc(value.node))
        return value


@dataclass(frozen=True)
class HostCall:
    """`rx.host(fn)`: called with traced values it records a host op, with anything else it calls the function."""

    fn: Any
    returns: str

    def __call__(self, *args: Any) -> Any:
        traced = next((a for a in args if isinstance(a, Value)), None)
        if traced is not None and self.returns not in get_args(Returns):
            traced.tracer.refuse(f"rx.host(.., returns={self.returns!r})", closest(self.returns, get_args(Returns)))
        return self.record(traced, *args)

    def record(self, traced: Value | None, *args: Any) -> Any:
        """The node of the call, by the recorder of a traced argument; without one the function's own result."""
        if traced is not None:
            return traced.tracer.record(ops.host, self._name(traced.tracer), *args, returns=self.returns)
        if isinstance(self.fn, Role):
            self.fn.recorder.refuse(
                f"{self.fn!r} needs prompts or a rollout", f"rx.host({self.fn.name})(prompts, rollout)"
            )
        return self.fn(*args)

    def _name(self, recorder: Recorder) -> str:
        """The name of a parameter, noted as a host function, or the address of a function."""
        if not isinstance(self.fn, Role):
            return host_name(self.fn, recorder)
        self.fn.uses.setdefault("host", recorder.here())
        return self.fn.name


@dataclass(frozen=True)
class ObserveCall:
    """`rx.observe(fn)`: called with a traced history and the responses to it, it records the history after them."""

    fn: Any

    def __call__(self, history: Any, rollout: Any) -> Any:
        traced = next((a for a in (history, rollout) if isinstance(a, Value)), None)
        if traced is not None:
            self._follow(traced.tracer, history, rollout)
        return HostCall(self.fn, ops.HISTORY).record(traced, history, rollout)

    def _follow(self, recorder: Recorder, history: Any, rollout: Any) -> None:
        """The responses are those sampled from the history: the trajectory has no gap."""
        if not all(isinstance(a, Value) for a in (history, rollout)) or history.node.meta["struct"] != "Prompts":
            recorder.refuse("rx.observe takes prompts and the responses to them", _OBSERVE)
        made = rollout.node
        if not graphs.is_op(made, ops.generate) or made.args[1] is not history.node:
            what = f"`{recorder.name_of(rollout)}` was not sampled from `{recorder.name_of(history)}`"
            recorder.refuse(f"an observation follows its own history: {what}", _OBSERVE)


_OBSERVE = "rollout = actor.generate(history, n=..), then rx.observe(environment)(history, rollout)"


def host_name(fn: Any, recorder: Recorder) -> str:
    """`module:function`, by which another process can find a host function; refuses what cannot be found again."""
    if not callable(fn):
        recorder.refuse(f"rx.host needs a function, not {fn!r}", "rx.host(reward)(prompts, rollout)")
    name = getattr(fn, "__qualname__", "")
    if not name or "<" in name:
        recorder.refuse(
            "a lambda or an inner function cannot be found by the process that calls it",
            "define it with def, at the top of a file",
        )
    return f"{fn.__module__}:{name}"


def host(fn: Any, returns: Returns = "scores") -> HostCall:
    """Any Python callable as a part of the graph, run on the host: `rx.host(reward)(prompts, rollout)`.

    `returns`: "scores" [prompt, group]; "prompts", one for each prompt; "sample_prompts", one for each response;
    "rollout", given responses.
    """
    return HostCall(fn, returns)


def observe(fn: Any) -> ObserveCall:
    """The environment of a multi-turn rollout, run on the host: `history = rx.observe(environment)(history, rollout)`.

    What it returns [prompt, group] begins with the history and the responses, and goes on with a new observation: the
    prompts of the next turn, one for each trajectory.
    """
    return ObserveCall(fn)
