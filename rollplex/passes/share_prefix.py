"""One prefix for each prompt, read by all of its responses: say how often each boundary is made and read.

boundary  role       prefixes  reads of each
kv_ref    reference        32              8
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, Node

from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.module import Module
from rollplex.ir.types import GROUP, dim_sizes
from rollplex.passes.prefix_split import Split


@dataclass(frozen=True)
class SharedPrefix:
    """A boundary: how many are made in a step, over all ranks, and how many suffixes read each."""

    boundary: str
    role: str
    prefixes: int
    readers: int
    why: str


@dataclass(frozen=True)
class SharedPrefixes:
    """Every boundary of the graph, in program order."""

    made_by: ClassVar[str] = "share-prefix"
    boundaries: tuple[SharedPrefix, ...]

    def of(self, boundary: str) -> SharedPrefix:
        """The row of this boundary; it must exist (our own bug otherwise)."""
        return next(b for b in self.boundaries if b.boundary == boundary)

    def __str__(self) -> str:
        rows = [("boundary", "role", "prefixes", "reads of each", "")]
        rows += [(b.boundary, b.role, str(b.prefixes), str(b.readers), b.why) for b in self.boundaries]
        first, second = (max(len(r[i]) for r in rows) for i in (0, 1))
        return "\n".join(f"{r[0]:<{first}}  {r[1]:<{second}}  {r[2]:>8}  {r[3]:>13}  {r[4]}".rstrip() for r in rows)


def shared(node: Node, job: Any) -> SharedPrefix:
    """How one boundary is shared: once a prompt when its prompts are the same for all responses of a group."""
    dims: tuple[str, ...] = g.type_of(node).dims  # type: ignore[union-attr]
    sizes = dim_sizes(job)
    prefixes = math.prod(sizes[d] for d in dims)
    calls = len(_suffixes(node))
    if g.observed(g.bound_arguments(node)["prompts"]):
        why = f"goes on from {g.pieces(node)[-2].name}, one for each trajectory"
        return SharedPrefix(node.name, g.role(node), prefixes, calls, why)
    if GROUP in dims:
        prompts = g.bound_arguments(node)["prompts"].name
        return SharedPrefix(node.name, g.role(node), prefixes, calls, f"not shared: {prompts} differ within a group")
    return SharedPrefix(node.name, g.role(node), prefixes, calls * sizes[GROUP], "one for each prompt")


def _suffixes(boundary: Node) -> list[Node]:
    """Suffixes that read a boundary, those of later turns through the boundaries that extend it."""
    found = [user for user in boundary.users if g.is_op(user, ops.suffix)]
    return found + [s for user in boundary.users if g.is_op(user, ops.prefix) for s in _suffixes(user)]


@dataclass(frozen=True)
class SharePrefix:
    """One prefix for each prompt group; the boundary is read once for each response.

    Job keys: `workload.prompts`, `workload.group`.
    """

    name: ClassVar[str] = "share-prefix"
    needs: ClassVar[tuple[type, ...]] = (Split,)
    makes: ClassVar[type] = SharedPrefixes

    def run(self, module: Module) -> Module:
        """The graph with `readers` on every boundary, and the fact `SharedPrefixes`."""
        assert module[Split] is not None
        graph: Graph = g.copy_graph(module.graph)
        rows = tuple(shared(n, module.job) for n in g.find(graph, ops.prefix))
        for row in rows:
            g.node_named(graph, row.boundary).meta["readers"] = row.readers
        return module.with_graph(graph).put(SharedPrefixes(rows))
