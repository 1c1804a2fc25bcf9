"""`@rx.algorithm`: one training iteration of an RL algorithm as a Python function, traced into a graph.

@rx.algorithm
def grpo(prompts, *, actor, reference, reward, n=8): ..

grpo.roles                    {"actor": "policy", "reference": "frozen"}
grpo.trace({"n": 4})          torch.fx.Graph
"""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.fx import Graph, Node

from rollplex.ir import graph as graphs
from rollplex.ir.errors import GraphError, Loc, Problem, RollplexError
from rollplex.ir.naming import named_graph
from rollplex.ir.params import number
from rollplex.ir.roles import Role, host, observe
from rollplex.ir.tensor_ops import (
    at_end,
    gae,
    group_normalize,
    masked_mean,
    masked_sum,
    sequence_mean,
    sequence_sum,
    trajectory_mean,
    whiten,
)
from rollplex.ir.tracing import Recorder, closest
from rollplex.ir.types import RoleKind

__all__ = [
    "Algorithm",
    "Critic",
    "Frozen",
    "HostFunction",
    "Policy",
    "Prompts",
    "algorithm",
    "at_end",
    "gae",
    "group_normalize",
    "host",
    "masked_mean",
    "masked_sum",
    "observe",
    "sequence_mean",
    "sequence_sum",
    "trajectory_mean",
    "whiten",
]


class Prompts:
    """Annotation of the prompts; fields tokens, mask [prompt, token], lengths [prompt]."""


class Policy:
    """Annotation of the role that is sampled from and trained."""


class Critic:
    """Annotation of a role that is trained and not sampled from."""


class Frozen:
    """Annotation of a role whose weights never change."""


class HostFunction:
    """Annotation of a parameter that is a Python function, called through rx.host."""


_KINDS: Mapping[str, RoleKind] = {"Policy": "policy", "Critic": "critic", "Frozen": "frozen"}


@dataclass(frozen=True, eq=False)
class Algorithm:
    """An algorithm: its function, and what its signature says. `parameters` are the keyword arguments with defaults."""

    fn: Callable[..., Any]
    name: str
    file: str
    line: int
    prompts: str
    parameters: Mapping[str, Any]
    handles: tuple[str, ...]

    @property
    def loc(self) -> Loc:
        """The line of the `def`."""
        return Loc(Path(self.file).name, self.line)

    @cached_property
    def _used(self) -> Mapping[str, Role]:
        return {h.name: h for h in self._run({}, None)[1]}

    @property
    def roles(self) -> Mapping[str, RoleKind]:
        """Every role that is used as a model, and what it is, by annotation or else by use."""
        return MappingProxyType({h.name: _kind(h) for h in self._used.values() if set(h.uses) - {"host"}})

    @property
    def hosts(self) -> tuple[str, ...]:
        """Parameters that are host functions, bound to Python callables when the algorithm runs."""
        return tuple(h.name for h in self._used.values() if "host" in h.uses)

    def trace(self, params: Mapping[str, Any] | None = None, roles: Mapping[str, RoleKind] | None = None) -> Graph:
        """Run the function on traced values. `roles` are the job's; without them, their use in the algorithm decides.

        Raises GraphError, with the user's file:line, for anything that cannot be part of a graph.
        """
        graph, handles = self._run(params or {}, roles)
        _check_roles(self, handles, roles)
        _check_updates(self, graph)
        graphs.verify(graph)
        return graph

    def _run(self, params: Mapping[str, Any], roles: Mapping[str, RoleKind] | None) -> tuple[Graph, list[Role]]:
        values = self._values(params)
        recorder = Recorder(self.fn.__code__)
        handles = [Role(h, recorder, _declared(self, h, roles)) for h in self.handles if h not in values]
        prompts = recorder.input(self.prompts, "Prompts", self.loc)
        prompts.node.meta["header"] = _header(self, values)
        arguments = {**{h.name: h for h in handles}, **{k: number(v, k) for k, v in values.items()}}
        _call(self, prompts, arguments)
        recorder.graph.output(tuple(graphs.updates(recorder.graph).values()))
        return named_graph(recorder.graph), handles

    def _values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        known = (*self.parameters, *self.handles)
        problems = [
            Problem(f"{self.name} has no parameter `{p}`", str(self.loc), closest(p, known))
            for p in params
            if p not in known
        ]
        if problems:
            raise GraphError(*problems)
        return {**self.parameters, **params}


def _call(algorithm: Algorithm, prompts: Any, arguments: Mapping[str, Any]) -> None:
    """Run the user's function; its own Python errors become ours, at the line of its file that raised."""
    try:
        algorithm.fn(prompts, **arguments)
    except RollplexError:
        raise
    except (Exception, SystemExit) as err:
        lines = [
            f.lineno for f in traceback.extract_tb(err.__traceback__) if f.filename == algorithm.fn.__code__.co_filename
        ]
        where = Loc(algorithm.loc.file, lines[-1] if lines and lines[-1] else algorithm.line)
        raise GraphError(f"{type(err).__name__}: {err}", where=where, hint="this line of the algorithm raised") from err


def _declared(algorithm: Algorithm, name: str, roles: Mapping[str, RoleKind] | None) -> RoleKind | None:
    """What the annotation or the job says a role is; they must agree."""
    by_annotation = _KINDS.get(_annotation(algorithm.fn.__annotations__.get(name)))
    by_job = (roles or {}).get(name)
    if by_annotation and by_job and by_annotation != by_job:
        raise GraphError(
            f"`{name}` is {by_annotation} in the algorithm and {by_job} in the job",
            where=algorithm.loc,
            hint="make them agree",
        )
    return by_annotation or by_job


def _kind(handle: Role) -> RoleKind:
    if handle.kind:
        return handle.kind
    if "update" in handle.uses and "values" in handle.uses and "generate" not in handle.uses:
        return "critic"
    return "policy" if {"generate", "update"} & set(handle.uses) else "frozen"


def _check_roles(algorithm: Algorithm, handles: list[Role], roles: Mapping[str, RoleKind] | None) -> None:
    """Every model the algorithm calls is in the job, and every role of the job is called; one role is the policy."""
    models = {h.name: h for h in handles if set(h.uses) - {"host"}}
    problems = []
    if roles is not None:
        for handle in models.values():
            if handle.name not in roles:
                where = str(min(handle.uses.values()))
                problems.append(
                    Problem(f"the job has no role `{handle.name}`", where, f"add roles.{handle.name} to the job")
                )
        for name in roles:
            if name not in models:
                hint = closest(name, models) if models else "remove it from the job"
                problems.append(
                    Problem(f"the job's role `{name}` is never called by {algorithm.name}", str(algorithm.loc), hint)
                )
    policies = [h for h in models.values() if _kind(h) == "policy"]
    if not problems and len(policies) > 1:
        first, second = policies[:2]
        problems.append(_two_policies(first, second))
    if problems:
        raise GraphError(*problems)


def _two_policies(first: Role, second: Role) -> Problem:
    uses = {h.name: next((u for u in ("update", "generate") if u in h.uses), "declared") for h in (first, second)}
    trained = second if "update" in second.uses else first
    other = first if trained is second else second
    return Problem(
        f"two policies: `{first.name}` ({uses[first.name]}) and `{second.name}` ({uses[second.name]})",
        str(trained.uses.get("update", min(trained.uses.values()))),
        f"one role is sampled from and updated: did you mean {other.name}.update(..)?",
    )


def _check_updates(algorithm: Algorithm, graph: Graph) -> None:
    """There is an update, its loss reaches the role it trains, and no gradient of it another trained role."""
    found = graphs.updates(graph)
    if not found:
        raise GraphError(
            f"{algorithm.name} updates no role", where=algorithm.loc, hint="end it with actor.update(loss)"
        )
    for role, node in found.items():
        if node.args[1] not in graphs.attached(graph, role):
            raise GraphError(
                f"the loss does not depend on `{role}`: no gradient would reach it",
                where=graphs.loc(node),
                hint=f"compute it from {role}.logprobs(prompts, rollout), and detach nothing on the way",
            )
        for other in (r for r in found if r != role):
            _check_apart(graph, role, node, other)


def _check_apart(graph: Graph, role: str, update: Node, other: str) -> None:
    """A loss may use another trained role's values, not send a gradient into its model."""
    loss, reached = update.args[1], graphs.attached(graph, other)
    if loss not in reached:
        return
    behind = graphs.ancestors(loss)  # type: ignore[arg-type]
    on_the_way = (n for n in graph.nodes if n in reached & behind)
    pairs = ((i, n) for n in on_the_way for i in n.all_input_nodes)
    call, user = next((i, n) for i, n in pairs if graphs.calls(i) and graphs.role(i) == other)
    raise GraphError(
        f"the loss of `{role}` sends a gradient into `{other}` through `{call.name}`",
        where=graphs.loc(user),
        hint=f"use {call.name}.detach() here; `{other}` learns from its own {other}.update(..)",
    )


def _header(algorithm: Algorithm, values: Mapping[str, Any]) -> str:
    """The line of the `def`, each parameter at its value; of annotations those that say what a role is."""
    parameters = [_parameter(p, values) for p in inspect.signature(algorithm.fn).parameters.values()]
    return f"{algorithm.name}({', '.join([parameters[0], '*', *parameters[1:]])})"


def _parameter(parameter: inspect.Parameter, values: Mapping[str, Any]) -> str:
    kind = _annotation(parameter.annotation)
    text = f"{parameter.name}: rx.{kind}" if kind in _KINDS else parameter.name
    return f"{text}={values[parameter.name]!r}" if parameter.name in values else text


def _annotation(annotation: Any) -> str:
    """The last name of an annotation, which may be a string."""
    written = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return written.rsplit(".", 1)[-1]


def _def_line(fn: Callable[..., Any]) -> int:
    """The line of the `def`: a function's first line is that of its first decorator."""
    first, file = fn.__code__.co_firstlineno, fn.__code__.co_filename
    lines = linecache.getlines(file)[first - 1 :]
    return first + next((i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)


def algorithm(fn: Callable[..., Any]) -> Algorithm:
    """Make an algorithm of a function `(prompts, *, roles and host functions, parameters=defaults)`."""
    if not inspect.isfunction(fn):
        raise GraphError(f"rx.algorithm needs a function, not {fn!r}", hint="@rx.algorithm above a def")
    where = Loc(Path(fn.__code__.co_filename).name, _def_line(fn))
    parameters = list(inspect.signature(fn).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keyword = [p for p in parameters if p.kind == p.KEYWORD_ONLY]
    if len(positional) != 1 or len(positional) + len(keyword) != len(parameters):
        raise GraphError(
            f"{fn.__name__} must take the prompts, then keyword-only arguments",
            where=where,
            hint=f"def {fn.__name__}(prompts, *, actor, reference, reward, n=8)",
        )
    return Algorithm(
        fn=fn,
        name=fn.__name__,
        file=fn.__code__.co_filename,
        line=where.line,
        prompts=positional[0].name,
        parameters=MappingProxyType({p.name: p.default for p in keyword if p.default is not p.empty}),
        handles=tuple(p.name for p in keyword if p.default is p.empty),
    )
