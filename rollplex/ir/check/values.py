"""Values: what a task takes was made or received before, and nothing that depends on a response runs too early.

controller   run load -> prompts        train   wait prompts    run prefix <- prompts
rollout      run generate -> rollout    train   barrier rollout-complete    run train <- rollout, score
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollplex.ir.check.facts import BY_GROUP, ROLLOUT_COMPLETE, Facts
from rollplex.ir.check.order import Order
from rollplex.ir.check.rules import At, Violation
from rollplex.ir.parts import group_of, round_of, whole, wholes
from rollplex.ir.plan import references
from rollplex.ir.steps import Run, Signal, Wait

WHOLE = -1


@dataclass
class _Values:
    """Values that each process has (by name: the microbatches it has them for), and those that depend on responses."""

    held: dict[str, dict[str, set[int]]]
    carried: dict[str, dict[str, set[int]]] = field(default_factory=dict)
    responses: set[str] = field(default_factory=set)

    def has(self, process: str, name: str, groups: set[int]) -> bool:
        """Whether a process has a value for all of these groups."""
        held = self.held[process].get(name, set())
        return WHOLE in held or groups <= held


def check_values(facts: Facts, order: Order) -> Iterator[Violation]:
    """Follow the values through one execution; any other gives the same, for events are signalled once."""
    values = _Values({p: {} for p in facts.programs})
    for at in order.sequence:
        match at.step:
            case Run():
                yield from _run(facts, values, at, at.step)
            case Signal(event=event, carries=names):
                lacking = [n for n in names if n not in values.held[at.process]]
                for name in lacking:
                    yield Violation("missing-value", f"carries {name}, which {at.process} does not have", at)
                values.carried[event] = {n: values.held[at.process].get(n, {WHOLE}) for n in names}
            case Wait(event=event):
                values.held[at.process].update(values.carried.get(event, {}))
            case _:
                pass
    yield from group_order(facts)
    yield from check_inputs(facts)


def _run(facts: Facts, values: _Values, at: At, step: Run) -> Iterator[Violation]:
    microbatch = step.microbatch if step.task in BY_GROUP else WHOLE
    for name in step.inputs:
        if not values.has(at.process, name, _groups(facts, step, name, microbatch)):
            yield Violation("missing-value", f"takes {name}, which {at.process} neither made nor received", at)
            values.held[at.process].setdefault(name, set()).add(WHOLE)
    # The responses of a turn, or of a round before the last, are final when they are sent.
    taken = () if step.node in facts.observations else [n for n in step.inputs if round_of(n) is None]
    late = values.responses.intersection(taken) or step.task in ("suffix", "train", "prefix_backward")
    yield from _own_group(facts, at, step)
    if late and not facts.past(at, ROLLOUT_COMPLETE) and not _of_one_group(facts, values, step):
        yield Violation("suffix-before-rollout", "responses are final only behind barrier rollout-complete", at)
    if step.task == "generate" and facts.past(at, ROLLOUT_COMPLETE):
        yield Violation("suffix-before-rollout", "it still makes responses behind barrier rollout-complete", at)
    for name in step.outputs:
        values.held[at.process].setdefault(name, set()).add(microbatch)
        if late or step.task == "generate":
            values.responses.add(name)


def _of_one_group(facts: Facts, values: _Values, step: Run) -> bool:
    """Whether all that a task takes of responses is of its own group, which is complete when it is sent."""
    late = values.responses.intersection(step.inputs) - facts.makers.keys()
    return facts.streamed and step.task != "grad_norm" and all(group_of(n) == step.microbatch for n in late)


def _own_group(facts: Facts, at: At, step: Run) -> Iterator[Violation]:
    """A task on a group takes its own part of a value, and a norm the parts of all groups."""
    found = [(name, group_of(name)) for name in step.inputs]
    if step.task == "grad_norm":
        groups = set(range(facts.taken(step.role)))
        for name in wholes(n for n, m in found if m is not None):
            if {m for n, m in found if m is not None and whole(n) == name} != groups:
                yield Violation("group-order", f"it takes {name} of some groups only", at)
        return
    for name, group in found:
        if group not in (None, step.microbatch):
            yield Violation("group-order", f"it takes {name}, and works on group {step.microbatch}", at)


def group_order(facts: Facts) -> Iterator[Violation]:
    """Under `streamed` gradients add up in the order of groups, so that the sum is that of every other schedule."""
    last: dict[tuple[str, str, str], int] = {}
    for at, step in facts.runs("train", "prefix_backward") if facts.streamed else ():
        key = (step.role, step.task, step.node)
        if step.microbatch < last.get(key, 0):
            yield Violation("group-order", f"it comes behind group {last[key]}: sums of gradients differ", at)
        last[key] = step.microbatch


def _groups(facts: Facts, step: Run, name: str, microbatch: int) -> set[int]:
    """The groups whose value a task needs: its own, or all that its maker works on.

    All where the loss mixes them (LossPlan.wide_inputs), or where the prompts of the maker's role are spread over the
    ranks in another way.
    """
    loss, maker = facts.plan.losses.get(step.role), facts.makers.get(name)
    wide = loss is not None and step.task == "train" and name in loss.wide_inputs
    if maker is None:
        return {microbatch}
    made = facts.taken(maker)
    return set(range(made)) if wide or made != facts.taken(step.role) else {microbatch}


# ---- what the graph says a task needs


def check_inputs(facts: Facts) -> Iterator[Violation]:
    """A task lists every value that its graph node is made of and that another task makes (design.md section 4).

    A training task may list more: every score of the step, whether or not the loss takes it.
    """
    makers = {s.node for _, s in facts.runs("load", "generate", "host", "suffix", "whole", "train")}
    args = {r.name: set(references([r.args, r.kwargs])) for r in facts.plan.graph}
    losses = {s.role: s.node for _, s in facts.runs("grad_norm")}
    for at, step in facts.runs("grad_norm"):
        loss = facts.plan.losses.get(step.role)
        if loss is not None and set(wholes(step.inputs)) != set(loss.divisor_inputs):
            given, taken = (", ".join(names) or "nothing" for names in (loss.divisor_inputs, step.inputs))
            what = f"takes {taken}, the divisor %{loss.divisor or 'none'} is made of {given}"
            yield Violation("missing-input", what, at)
    known: dict[tuple[str, str], set[str]] = {}
    forwards: dict[str, set[str]] = {}
    for _, step in facts.runs("train"):
        forwards.setdefault(step.role, set()).add(step.node)
    for at, step in facts.runs("generate", "host", "prefix", "suffix", "whole", "train", "prefix_backward"):
        node = losses.get(step.role, step.node) if step.task == "train" else step.node
        own = forwards[step.role] if step.task == "train" else {step.node}
        if (node, step.node) not in known:
            known[node, step.node] = _makers_behind(node, args, makers, own)
        needed, given = known[node, step.node] | _choice(facts, at, step), set(wholes(step.inputs))
        for name in sorted(needed - given):
            yield Violation("missing-input", f"%{node} is made of %{name}, which is not among its inputs", at)
        for name in sorted(given - (makers - own if step.task == "train" else needed)):
            yield Violation("missing-input", f"%{node} is not made of %{name}, which is among its inputs", at)


def _choice(facts: Facts, at: At, step: Run) -> set[str]:
    """The responses that say which of the sampled prompts a step takes: a prefix behind them is of those alone."""
    if facts.plan.summary.tail is None or step.task != "prefix" or not facts.past(at, ROLLOUT_COMPLETE):
        return set()
    return {s.node for _, s in facts.runs("generate")}


def _makers_behind(node: str, args: dict[str, set[str]], makers: set[str], own: set[str]) -> set[str]:
    """The nearest nodes behind `node` that other tasks make; a role's train tasks make its own forwards themselves."""
    found: set[str] = set()
    todo, seen = list(args.get(node, ())), set[str]()
    while todo:
        name = todo.pop()
        if name in makers and name not in own:
            found.add(name)
        elif name not in seen:
            seen.add(name)
            todo.extend(args.get(name, ()))
    return found
