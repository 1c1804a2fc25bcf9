"""Rounds of sampling: which value of the graph says that a group teaches nothing, and what it is made of.

informative = correct.amax(1, keepdim=True) > correct.amin(1, keepdim=True)
loss = rx.masked_mean(-policy, rollout.mask & informative)      groups of which this mask keeps no token: sampled again

Source: DAPO (Yu et al., arXiv 2503.14476, section 3.2), whose groups of one score are the case of examples/dapo.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.errors import GraphError
from rollplex.ir.job import Job
from rollplex.ir.loss import mixes_prompts

_HINT = (
    "leave groups out of the loss by their scores, as examples/dapo.py does: mask = rollout.mask & (score.amax(1, "
    "keepdim=True) > score.amin(1, keepdim=True)); or workload.dynamic_sampling=null"
)


@dataclass(frozen=True)
class SamplingRounds:
    """At most `most` rounds a step; `keeps` is the loss's mask, `made_of` the prompts, rollout and scores it needs."""

    most: int
    keeps: str
    made_of: tuple[str, ...]

    @property
    def last(self) -> int:
        """The number of the last round: the one beside which prefixes run."""
        return self.most - 1

    @property
    def before(self) -> range:
        """The rounds before the last."""
        return range(self.last)


def rounds_of(graph: fx.Graph, job: Job) -> SamplingRounds | None:
    """The rounds of a job's step; None where each prompt is sampled for once.

    Raises GraphError for a loss that leaves no group out, or whose mask needs what is not there between two rounds.
    """
    if (again := job.workload.dynamic_sampling) is None:
        return None
    mask = _mask(graph, job.policy)
    behind = g.ancestors(mask)
    if (model := next((n for n in graph.nodes if n in behind and _needs_model(n)), None)) is not None:
        raise _refused(mask, f"is made of %{model.name}, which a model makes behind the rollout")
    if not any(g.is_op(n, ops.host) for n in behind):
        raise _refused(mask, "leaves no group out: it is made of no host function's scores")
    typed = all("type" in n.meta for n in behind)  # not in a graph read from a plan, which was checked before
    if typed and (wide := next((n for n in graph.nodes if n in behind and mixes_prompts(n)), None)) is not None:
        raise _refused(mask, f"mixes the prompts of a step in %{wide.name}: what it says of a group changes by round")
    made = (n for n in graph.nodes if n.op == "placeholder" or g.is_op(n, ops.generate, ops.host))
    return SamplingRounds(again.rounds, mask.name, tuple(n.name for n in made if n in behind or n.op == "placeholder"))


def _mask(graph: fx.Graph, role: str) -> fx.Node:
    """The mask of a role's loss; of several there is none that speaks for the loss."""
    update = g.updates(graph)[role]
    masked = [n for n in g.find(graph, ops.masked_mean, ops.masked_sum) if n in g.ancestors(update)]
    masks = dict.fromkeys(g.bound_arguments(n)["mask"] for n in masked if _needs_any(n, role))
    if len(masks) != 1:
        has = f"{len(masks)} masks: {', '.join(f'%{m.name}' for m in masks)}" if masks else "no mask"
        what = f"dynamic sampling samples groups again that the loss leaves out, and the loss of `{role}` has {has}"
        raise GraphError(what, where=g.loc(update), hint=_HINT)
    return next(iter(masks))


def _needs_any(node: fx.Node, role: str) -> bool:
    """Whether a masked sum is of what the trained model says: others are statistics on the way to it."""
    return any(g.calls(n) and g.role(n) == role for n in g.ancestors(node))


def _needs_model(node: fx.Node) -> bool:
    return g.runs_model(node) and not g.is_op(node, ops.generate)


def _refused(mask: fx.Node, why: str) -> GraphError:
    what = f"dynamic sampling samples groups again that the loss leaves out, and its mask %{mask.name} {why}"
    return GraphError(what, where=g.loc(mask), hint=_HINT)
