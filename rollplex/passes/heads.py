"""What each role's model ends in, by how the algorithm calls it: logits, or the one number of a critic or reward model.

actor.logprobs(..)      logits         critic.values(..), judge.score(..)      scalar
"""

from __future__ import annotations

from torch.fx import Graph, Node

from rollplex.ir import graph as g
from rollplex.ir.errors import GraphError
from rollplex.ir.job import Job

HEADS = {"logprobs": "logits", "values": "scalar", "score": "scalar"}


def heads(graph: Graph) -> dict[str, tuple[str, Node]]:
    """The head of every role that is called on responses, and the call that says so; GraphError for two heads."""
    found: dict[str, tuple[str, Node]] = {}
    for node in (n for n in graph.nodes if g.calls(n)):
        role, head = g.role(node), HEADS[g.head(node)]
        first, earlier = found.setdefault(role, (head, node))
        if head != first:
            raise GraphError(
                f"`{role}` ends in {first} at line {g.loc(earlier).line} and in {head} here",
                where=g.loc(node),
                hint="a model has one head: make the critic a role of its own",
            )
    return found


def with_heads(graph: Graph, job: Job) -> Job:
    """The job with `head: scalar` on the roles that give values or scores; GraphError where the job says otherwise."""
    changed = {}
    for name, (head, node) in heads(graph).items():
        stated = job.roles[name].head
        if stated not in ("auto", head):
            what = f"`{name}` is called for {g.head(node)}, and the job says roles.{name}.head: {stated}"
            raise GraphError(what, where=g.loc(node), hint=f"roles.{name}.head: {head}, or leave it out")
        if head == "scalar" and stated == "auto":
            changed[name] = job.roles[name].model_copy(update={"head": "scalar"}).model_dump()
    if not changed:
        return job
    data = job.model_dump()
    return Job.model_validate({**data, "roles": {**data["roles"], **changed}})
