"""The graph is one that programs can be held to: each record is made of earlier ones, each call belongs to a role.

prompts  input | rollout  rx.generate("actor", %prompts, n=8) | .. | loss  rx.masked_mean(%mul, %mask) | rx.update
A call names its role (or its host function) first: whatever else there is is maths, and runs inside the tasks of P2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from rollplex.ir.check.facts import Facts
from rollplex.ir.check.rules import Violation
from rollplex.ir.plan import NodeRecord, references
from rollplex.ir.steps import Run, UpdateChunk

MATHS_PHASE = "P2"


def is_call(record: NodeRecord) -> bool:
    """Whether a model, a host function or an optimizer does the work."""
    return record.op.startswith("rx.") and bool(record.args) and isinstance(record.args[0], str)


def is_maths(record: NodeRecord) -> bool:
    """Whether a record is tensor maths."""
    return record.op != "input" and not is_call(record)


def inputs(record: NodeRecord) -> tuple[str, ...]:
    """Names that a record reads, each once."""
    return tuple(dict.fromkeys(references([record.args, record.kwargs])))


def updates(facts: Facts) -> dict[str, NodeRecord]:
    """The update of each role."""
    return {str(r.args[0]): r for r in facts.plan.graph if r.op == "rx.update" and is_call(r)}


ARGUMENTS = {
    "rx.generate": 2,
    "rx.prefix": 2,
    "rx.suffix": 3,
    "rx.logprobs": 3,
    "rx.values": 3,
    "rx.score": 3,
    "rx.update": 2,
}


def records(facts: Facts) -> Iterator[Violation]:
    """Every record has a name of its own, and reads records before it; calls take what they take (design section 3)."""
    for r in facts.plan.graph:
        asked = ARGUMENTS.get(r.op, len(r.args)) + (r.op == "rx.prefix" and facts.turn[r.name] > 1)
        if is_call(r) and len(r.args) != asked:
            yield Violation("graph", f"{r.op} takes {asked} arguments, not {len(r.args)}", where=f"%{r.name}")
    for name, count in Counter(r.name for r in facts.plan.graph).items():
        if count > 1:
            yield Violation("graph", f"{count} records are named %{name}", where=name)
    seen: set[str] = set()
    for record in facts.plan.graph:
        for name in inputs(record):
            if name not in seen:
                yield Violation("graph", f"it reads %{name}, which comes later or not at all", where=f"%{record.name}")
        seen.add(record.name)


def arguments(facts: Facts) -> Iterator[Violation]:
    """A suffix goes on from a prefix of its role and takes responses; prompts are the step's, or a host function's."""
    graph = {r.name: r for r in facts.plan.graph}
    for r in facts.plan.graph:
        if not is_call(r):
            continue
        values = [graph.get(n) for n in references(r.args)]
        first = values[0] if values else None
        if r.op == "rx.suffix" and (first is None or (first.op, first.args[:1]) != ("rx.prefix", r.args[:1])):
            yield Violation("graph", f"it goes on from no prefix of {r.args[0]}", where=f"%{r.name}")
        if r.op in ("rx.prefix", "rx.generate") and (first is None or first.op not in ("input", "rx.host")):
            yield Violation("graph", "its prompts are neither the step's nor a host's", where=f"%{r.name}")
        if r.op in TAKES_RESPONSES and (values[-1] is None or values[-1].op not in ("rx.generate", "rx.host")):
            yield Violation("graph", "it takes no responses of this step", where=f"%{r.name}")


TAKES_RESPONSES = ("rx.suffix", "rx.logprobs", "rx.values", "rx.score")


def phases(facts: Facts) -> Iterator[Violation]:
    """A record is in the phase of the window that executes it; maths has no window, and runs in P2."""
    phase_of = {w.name: w.phase for w in facts.plan.summary.windows}
    found: dict[str, str] = {}
    updated = {role: r.name for role, r in updates(facts).items()}
    for at in facts.steps():
        if isinstance(at.step, Run) and at.step.task not in ("grad_norm", "prefix_backward"):
            found[at.step.node] = phase_of[at.step.window]
        elif isinstance(at.step, UpdateChunk) and at.step.role in updated:
            found[updated[at.step.role]] = phase_of[at.step.window]
    for record in facts.plan.graph:
        planned = found.get(record.name, MATHS_PHASE if is_maths(record) else record.phase)
        if record.phase != planned:
            what = f"it is said to be in {record.phase or 'no phase'}, and runs in {planned}"
            yield Violation("graph", what, where=f"%{record.name}")


def trained(facts: Facts) -> Iterator[Violation]:
    """Roles that the graph updates are those that programs update."""
    asked, done = set(updates(facts)), set(facts.trained)
    for role in sorted(asked ^ done):
        what = "the graph updates it, no program does" if role in asked else "programs update it, the graph does not"
        yield Violation("graph", what, where=role)


RETURNS = ("scores", "prompts", "sample_prompts", "history", "rollout")


def hosts(facts: Facts) -> Iterator[Violation]:
    """Host functions are bound to the parameters that the graph names."""
    asked = {r.name: r.args[0] for r in facts.plan.graph if r.op == "rx.host" and is_call(r)}
    for record in facts.plan.graph:
        if record.name in asked and record.kwargs.get("returns", "scores") not in RETURNS:
            yield Violation("graph", f"a host function returns no {record.kwargs['returns']}", where=f"%{record.name}")
    for name in sorted({*asked, *facts.plan.hosts}):
        if asked.get(name) != facts.plan.hosts.get(name):
            what = f"the graph calls {asked.get(name, 'nothing')}, hosts says {facts.plan.hosts.get(name, 'nothing')}"
            yield Violation("graph", what, where=f"%{name}")


CHECKS: tuple[Callable[[Facts], Iterator[Violation]], ...] = (records, arguments, phases, trained, hosts)


def check_graph(facts: Facts) -> tuple[Violation, ...]:
    """Everything that is wrong with the graph itself."""
    return tuple(v for check in CHECKS for v in check(facts))
