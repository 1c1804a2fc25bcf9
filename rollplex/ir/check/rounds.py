"""Rounds of sampling: what a round samples for and judges is its own, and decides which prompts the next one has.

round 0       load -> prompts@0    generate <- prompts@0 -> rollout@0    host <- rollout@0 -> score@0
round 1       load <- prompts@0, rollout@0, score@0 -> prompts@1    ..
last          load <- prompts@1, rollout@1, score@1 -> prompts      generate -> rollout    host -> score, for the step
There is no loop: capacity, order and values of every round are replayed as those of any other step.
Source: DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.ir.check.facts import Facts
from rollplex.ir.check.rules import Violation
from rollplex.ir.parts import round_of
from rollplex.ir.plan import NodeRecord, references
from rollplex.ir.planned_rounds import Rounds

MASKED = ("rx.masked_mean", "rx.masked_sum")


def told(facts: Facts) -> Iterator[Violation]:
    """The plan has the job's rounds; a job that would be refused is told elsewhere."""
    if facts.job is None:
        return
    again = facts.job.workload.dynamic_sampling
    says = facts.plan.summary.rounds
    given, asked = says.most if says else 1, again.rounds if again else 1
    if given != asked or (says is None) != (again is None):
        yield Violation("round", f"rounds of sampling are {given}, the job has {asked}", where="summary.rounds")


def keeps(facts: Facts, rounds: Rounds) -> Iterator[Violation]:
    """What keeps a group is the mask of the policy's loss, made of scores and of nothing that a later round changes."""
    graph = {r.name: r for r in facts.plan.graph}
    role = next((str(r.args[0]) for r in facts.plan.graph if r.op == "rx.generate" and r.args), "")
    loss = facts.plan.losses.get(role)
    summed = [graph[r.name.removesuffix(".sum")] for r in loss.group if _masks(graph, r)] if loss else []
    masks = {name for r in summed for name in _mask(r)}
    if masks != {rounds.keeps}:
        what = f"groups are kept by %{rounds.keeps}, the loss's mask is {', '.join(f'%{m}' for m in sorted(masks))}"
        yield Violation("round", what, where="summary.rounds")
        return
    behind = _behind(graph, rounds.keeps)
    if not any(graph[n].op == "rx.host" for n in behind):
        yield Violation("round", f"%{rounds.keeps} is made of no scores, and keeps every group", where="summary.rounds")
    for name in sorted(behind):
        if graph[name].op in ("rx.suffix", "rx.logprobs", "rx.values", "rx.score") or (loss and name in loss.wide):
            what = f"%{rounds.keeps} is made of %{name}, which is not known of one round's groups alone"
            yield Violation("round", what, where="summary.rounds")


def _masks(graph: dict[str, NodeRecord], record: NodeRecord) -> bool:
    return record.op in MASKED and record.name.removesuffix(".sum") in graph


def _mask(record: NodeRecord) -> tuple[str, ...]:
    """The mask of a masked sum: its second argument, or the one of that name."""
    return tuple(references([record.args[1:2], record.kwargs.get("mask")]))


def _behind(graph: dict[str, NodeRecord], name: str) -> set[str]:
    found, todo = set[str](), [name]
    while todo:
        here = todo.pop()
        if here in graph and here not in found:
            found.add(here)
            todo.extend(references([graph[here].args, graph[here].kwargs]))
    return found


def own_values(facts: Facts) -> Iterator[Violation]:
    """A task of a round takes that round's values, a load all that the round before has found, others the step's."""
    for at, step in facts.runs("load", "generate", "host"):
        if not facts.by_round(step):
            continue
        if step.task == "load":
            wanted = {facts.in_round(n, step.microbatch - 1) for n in facts.judged} if step.microbatch else set[str]()
            wrong = wanted ^ set(step.inputs)
        else:  # what it lacks is told where the graph is asked
            wrong = set(step.inputs) - {facts.in_round(n, step.microbatch) for n in facts.judged}
        for name in sorted(wrong):
            yield Violation("round", f"round {step.microbatch} {_takes(name in step.inputs)} {name}", at)
    for at, step in facts.runs(*OTHERS):
        for name in (n for n in step.inputs if round_of(n) is not None):
            yield Violation("round", f"it takes {name}, which is not what the step comes to", at)


OTHERS = ("prefix", "suffix", "whole", "train", "prefix_backward", "grad_norm")


def _takes(taken: bool) -> str:
    return "takes" if taken else "is made without"


def check_rounds(facts: Facts) -> Iterator[Violation]:
    """Everything that is wrong with rounds of sampling."""
    yield from told(facts)
    if facts.plan.summary.rounds is not None:
        yield from keeps(facts, facts.plan.summary.rounds)
    yield from own_values(facts)
