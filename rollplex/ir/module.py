"""What passes hand to each other: the graph, the job, and facts looked up by their type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from rollplex.ir.errors import PassError

if TYPE_CHECKING:
    from torch.fx import Graph

    from rollplex.ir.dsl import Algorithm
    from rollplex.ir.job import Job

Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Module:
    """One algorithm under one job, on its way through the passes; nothing in it is changed in place."""

    graph: Graph
    job: Job
    algorithm: Algorithm
    facts: Mapping[type, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __getitem__(self, fact: type[Fact]) -> Fact:
        """The fact of this type; PassError names the pass that makes it when it is not there yet."""
        if fact not in self.facts:
            maker = getattr(fact, "made_by", "a pass")
            raise PassError(f"no {fact.__name__} yet", hint=f"run `{maker}` earlier in the pipeline")
        return self.facts[fact]

    def __contains__(self, fact: type) -> bool:
        return fact in self.facts

    def put(self, *facts: Any) -> Module:
        """A module that also knows these facts (a fact of the same type is replaced)."""
        return replace(self, facts=MappingProxyType({**self.facts, **{type(f): f for f in facts}}))

    def with_graph(self, graph: Graph) -> Module:
        """The same module over a rewritten graph."""
        return replace(self, graph=graph)
