"""Tasks: each executes a node of its own kind in the graph, once, and lists what it uses.

    task       load    generate     host     prefix, prefix_backward   suffix, train   grad_norm
    node       input   rx.generate  rx.host  rx.prefix                 rx.suffix       rx.update
`whole`, and `train` of a role without a prefix, execute a call that is not split: rx.logprobs, rx.values, rx.score.
What a task leaves out of its lists escapes every other check, so the lists are held to what its role must use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from rollplex.ir.check.facts import Facts
from rollplex.ir.check.rules import At, Violation
from rollplex.ir.parts import group_of, part, wholes
from rollplex.ir.plan import NodeRecord
from rollplex.ir.steps import Run, Task

WHOLE = ("rx.logprobs", "rx.values", "rx.score")
OPS: dict[Task, tuple[str, ...]] = {
    "load": ("input",),
    "generate": ("rx.generate",),
    "host": ("rx.host",),
    "prefix": ("rx.prefix",),
    "prefix_backward": ("rx.prefix",),
    "suffix": ("rx.suffix",),
    "whole": WHOLE,
    "train": ("rx.suffix", *WHOLE),
    "grad_norm": ("rx.update",),
}
MAKERS = ("load", "generate", "host")


def nodes(facts: Facts) -> Iterator[Violation]:
    """A task executes a node of its own kind and role (design.md section 4, lower)."""
    graph = {r.name: r for r in facts.plan.graph}
    for at, step in facts.runs(*OPS):
        if not _executes(step, graph.get(step.node)) or (step.role and step.task in ("load", "host")):
            yield Violation("node", f"%{step.node} is no {OPS[step.task][0]} of {step.role or 'the graph'}", at)
    for record in facts.plan.graph:
        if record.op == "rx.host" and record.name not in facts.plan.hosts:
            yield Violation("node", f"no parameter of the algorithm is bound to host function %{record.name}")


def _executes(step: Run, record: NodeRecord | None) -> bool:
    if record is None or record.op not in OPS[step.task]:
        return False
    return step.task in ("load", "host") or record.args[:1] == (step.role,)


def once(facts: Facts) -> Iterator[Violation]:
    """Prompts, responses and host results are made once, or once a round, and all that the graph asks for."""
    done = Counter(name for _, s in facts.runs(*MAKERS) for name in s.outputs or (s.node,))
    asked = {r.name for r in facts.plan.graph if r.op in ("input", "rx.generate", "rx.host")}
    parted = wholes(name for name in done if group_of(name) is not None) if facts.streamed else ()
    groups = range(facts.group_count(facts.trained[-1])) if parted else range(0)
    wanted = {part(node, m) for node in parted for m in groups} | (asked - set(parted))
    wanted |= {facts.in_round(node, r) for node in facts.judged for r in range(facts.last_round)}
    for node in sorted({*done, *wanted}):
        if done[node] != 1:
            yield Violation("once", f"%{node} is made {done[node]} times", where=node)
        if node not in wanted and node in done:
            yield Violation("once", f"%{node} is no value of the graph", where=node)


def outputs(facts: Facts) -> Iterator[Violation]:
    """A task gives the value of its node; backward gives none, and the norm is no value of the graph."""
    graph = {r.name for r in facts.plan.graph}
    for at, step in facts.runs(*OPS):
        if step.task == "grad_norm":
            right = len(step.outputs) == 1 and step.outputs[0] not in graph
        elif step.task == "train":  # whose value others may need, and who needs it will miss it
            right = step.outputs in ((), (step.node,))
        else:
            made = part(step.node, step.microbatch) if in_parts(facts, step) else step.node
            made = facts.in_round(made, step.microbatch) if facts.by_round(step) else made
            right = step.outputs == ((made,) if step.task in (*MAKERS, "suffix", "whole") else ())
        if not right:
            what = f"it works on %{step.node} and gives {', '.join(step.outputs) or 'nothing'}"
            yield Violation("once", what, at)


def in_parts(facts: Facts, step: Run) -> bool:
    """Whether a task makes a value group by group: responses under `streamed`, and what hosts make of them."""
    if not facts.streamed or step.task not in ("generate", "host"):
        return False
    return step.task == "generate" or any(group_of(name) is not None for name in step.inputs)


def listed(facts: Facts) -> Iterator[Violation]:
    """A task reads its role's weights and boundary, and writes boundary, gradients or what its engine works in."""
    working = {n for _, step in facts.runs("generate") for n in step.writes}  # the same in every turn
    for at, step in (*facts.runs("generate"), *facts.groups):
        for name in sorted(_reads(facts, at, step) - set(step.reads)):
            yield Violation("task-objects", f"it reads no {name}", at, name)
        wanted = working if step.task == "generate" else _writes(facts, step)
        for name in sorted(wanted - set(step.writes)):
            yield Violation("task-objects", f"it writes no {name}", at, name)
        lent = facts.needed_bases(step.role)
        own = {n for n in step.reads if facts.objects[n].class_ == "regenerable" and facts.objects[n].role == step.role}
        if not own and not lent.intersection(step.reads):
            yield Violation("task-objects", f"it reads no weights of {step.role}", at)


def _reads(facts: Facts, at: At, step: Run) -> set[str]:
    """What a task cannot do without: all weights from the start of a model on, the boundary where it resumes."""
    turn = facts.turn.get(step.node, 1)
    pieces = [o.name for o in facts.pieces.get(step.role, ())]
    if step.task in ("suffix", "train"):
        return set(pieces[:turn]) | facts.needed_bases(step.role)
    if step.task == "prefix_backward":
        return set(pieces[: turn - 1])
    own = (o for o in facts.objects.values() if o.class_ == "regenerable" and o.role == step.role)
    here = (o for o in own if at.process in (o.process, *o.readers))
    copies = () if step.task == "generate" else facts.copies
    lent = set() if step.task == "generate" else facts.needed_bases(step.role)
    extended = pieces[: turn - 1] if step.task == "prefix" else []
    return {o.name for o in here if o.name not in copies}.union(lent, extended)


def _writes(facts: Facts, step: Run) -> set[str]:
    if step.task == "prefix":
        turn = facts.turn.get(step.node, 1)
        return {o.name for o in facts.pieces.get(step.role, ())[turn - 1 : turn]}
    return set(facts.gradients(step.role)) if step.task in ("train", "prefix_backward") else set()


def same_objects(facts: Facts) -> Iterator[Violation]:
    """A task lists the same objects and values for every group: what one leaves out escapes the other checks.

    Decode that is waited for group by group is one task too.
    """
    first: dict[tuple[str, str, str], tuple[At, frozenset[str]]] = {}
    for at, step in (*facts.groups, *facts.runs("generate")):
        listed = frozenset((*step.reads, *step.writes, *step.streams, *wholes(step.inputs)))
        like, expected = first.setdefault((step.role, step.task, step.node), (at, listed))
        if listed != expected:
            names = ", ".join(sorted(listed ^ expected))
            yield Violation("task-objects", f"it differs from {like} in {names}", at)


CHECKS: tuple[Callable[[Facts], Iterator[Violation]], ...] = (nodes, once, outputs, listed, same_objects)


def check_tasks(facts: Facts) -> tuple[Violation, ...]:
    """Everything that is wrong with what tasks execute and list."""
    return tuple(v for check in CHECKS for v in check(facts))
