"""Split every model call at the first response position: what comes before it need not wait for the rollout.

before    ref_logp = reference.logprobs(prompts, rollout)
after     kv_ref   = reference.prefix(prompts)                 may run while the rollout decodes
          ref_logp = reference.suffix(kv_ref, rollout)         waits for the rollout

What depends on the response is a question of reachability from `generate` through any op, whatever its name. A history
depends on the responses of earlier turns, not on those that follow it: its prefix extends the boundary before it.

before    ref_logp_1 = reference.logprobs(history, rollout_1)
after     kv_ref_1   = reference.prefix(history, kv_ref)       what is new in the history, on top of kv_ref
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, Node

from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.module import Module
from rollplex.ir.types import StructType
from rollplex.passes.infer_types import Types, types_of


@dataclass(frozen=True)
class SplitCall:
    """One model call: the nodes it became, or why it stays whole; `early` when all of it may run in phase P1."""

    node: str
    role: str
    prefix: str | None
    suffix: str | None
    why: str
    early: bool = False


@dataclass(frozen=True)
class Split:
    """What became of every model call that scores or trains, in program order."""

    made_by: ClassVar[str] = "prefix-split"
    calls: tuple[SplitCall, ...]

    def __str__(self) -> str:
        rows = [(c.node, f"{c.prefix} + {c.suffix}" if c.prefix else "whole", c.role, c.why) for c in self.calls]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        return "\n".join("  ".join([*(f"{c:<{w}}" for c, w in zip(row, widths, strict=False)), row[3]]) for row in rows)


class _Splitting:
    """One walk over a graph: calls are copied, or replaced by a suffix on a boundary that calls of a role share."""

    def __init__(self, graph: Graph, whole: frozenset[str] = frozenset()) -> None:
        self.source, self.whole = graph, whole
        self.late = g.response_dependent(graph)
        self.trained = set(g.updates(graph))
        self.graph = Graph()
        self.twin: dict[Node, Node] = {}
        self.boundaries: dict[tuple[str, Node], Node] = {}
        self.calls: list[SplitCall] = []

    def run(self) -> Graph:
        """The rewritten copy."""
        for node in self.source.nodes:
            if g.is_op(node, *ops.MODEL_CALLS.values()):
                self.twin[node] = self._call(node)
            elif g.is_op(node, ops.prefix):
                self.twin[node] = self._written_prefix(node)
            else:
                self.twin[node] = self._copy(node)
        return self.graph

    def _call(self, node: Node) -> Node:
        bound = g.bound_arguments(node)
        role, prompts, rollout = bound["role"], bound["prompts"], bound["rollout"]
        if prompts in self.late and (not g.observed(prompts) or rollout in g.ancestors(prompts)):
            return self._whole(node, f"its prompts {prompts.name} depend on the response", early=False)
        if rollout not in self.late:
            return self._whole(node, "nothing of it depends on the response: all of it may run in P1", early=True)
        if role in self.whole:
            return self._whole(node, f"{role}'s engine runs whole sequences", early=False)
        boundary = self._boundary(role, prompts, node)
        head = {} if g.head(node) == "logprobs" else {"head": g.head(node)}
        new = self._create(ops.suffix, (role, boundary, self.twin[rollout]), node.name, node.meta, head)
        when = f" of turn {g.turn(prompts)}" if g.observed(prompts) else ""
        why = f"{prompts.name} is known before decode{when}"
        self.calls.append(SplitCall(node.name, role, boundary.name, new.name, why))
        return new

    def _whole(self, node: Node, why: str, early: bool) -> Node:
        self.calls.append(SplitCall(node.name, g.role(node), None, None, why, early))
        return self._copy(node)

    def _boundary(self, role: str, prompts: Node, call: Node) -> Node:
        """The one boundary of a role on these prompts, made at its first use, with those that it extends."""
        if (role, prompts) not in self.boundaries:
            dims, late = getattr(g.type_of(prompts), "dims", ()), prompts in self.late
            kind = StructType("Boundary", dims, attached=role in self.trained, response_dependent=late)
            meta = {"loc": g.loc(call), "label": f"kv_{role[:3]}", "struct": "Boundary", "type": kind}
            before = (self._boundary(role, prompts.args[1], call),) if g.observed(prompts) else ()  # type: ignore[arg-type]
            made = self._create(ops.prefix, (role, self.twin[prompts], *before), f"kv_{role[:3]}", meta)
            self.boundaries[role, prompts] = made
        return self.boundaries[role, prompts]

    def _written_prefix(self, node: Node) -> Node:
        """A prefix that the user wrote: kept, unless the same boundary is there already."""
        role, prompts = g.role(node), g.bound_arguments(node)["prompts"]
        if g.observed(prompts):
            return self._boundary(role, prompts, node)
        if (role, prompts) not in self.boundaries:
            self.boundaries[role, prompts] = self._copy(node)
        return self.boundaries[role, prompts]

    def _copy(self, node: Node) -> Node:
        args, kwargs = g.map_nodes((node.args, node.kwargs), self.twin)
        new = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        new.meta = dict(node.meta)
        if g.is_op(node, ops.suffix):
            self.calls.append(SplitCall(new.name, g.role(new), new.args[1].name, new.name, "written split"))  # type: ignore[union-attr]
        return new

    def _create(
        self, fn: Any, args: tuple[Any, ...], name: str, meta: dict[str, Any], kwargs: dict[str, Any] | None = None
    ) -> Node:
        new = self.graph.create_node("call_function", fn, args, kwargs or {}, name=name)
        new.meta = dict(meta)
        return new


@dataclass(frozen=True)
class PrefixSplit:
    """Every model call becomes prefix + suffix where its prompts are known before the response."""

    name: ClassVar[str] = "prefix-split"
    needs: ClassVar[tuple[type, ...]] = (Types,)
    makes: ClassVar[type] = Split

    def run(self, module: Module) -> Module:
        """The split graph, the fact `Split`, and `Types` with the boundaries."""
        types = module[Types]
        job = module.job
        walk = _Splitting(module.graph, frozenset(r for r in job.roles if job.whole_sequences(r)))
        graph = walk.run()
        return module.with_graph(graph).put(Split(tuple(walk.calls)), types_of(graph, module.job, types.warnings))
