"""The weight classes of the layout, counted again from the tensors of the model, and what other row orders would give.

    qkv        q, k, v and their biases of all layers       shard_bytes   their shards on a rollout rank
    gate_up    gate and up                                  expert_*      a stack of matrices, one an expert
Predicted seconds (decode_s, rebuild_s, exchange_s) and the most that a GPU sends are the passes' own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from rollplex.ir.check.facts import Facts
from rollplex.ir.check.rules import Violation
from rollplex.ir.job import Job
from rollplex.ir.lora import trained_parts
from rollplex.ir.planned_layout import LayoutAlternative, LayoutClass
from rollplex.ir.shards import EXPERTS
from rollplex.ir.spec import ModelSpec

FUSED = {
    "qkv": ("q", "k", "v", "q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
}
"""Classes that engines store as one weight; any other has the tensors of one kind."""
MOST_CLASSES = 16
"""Of a model; a plan that lists more has some twice, and is refused for that."""
CASES = ("1", "2", "3")
ORDERS = ("stock", "reindex")
"""Row orders that a plan compares with its own; `auto` is made of them."""


def kinds(name: str) -> tuple[str, ...]:
    """The kinds of tensors in a class."""
    return FUSED.get(name, (name,))


@dataclass(frozen=True)
class OfModel:
    """A weight class as the model has it; `shard` are elements on a rollout rank."""

    names: frozenset[str]
    params: int
    pieces: int
    shard: int


@lru_cache(maxsize=512)
def of_model(spec: ModelSpec, name: str, tp: int) -> OfModel:
    """The language tensors of a class's kinds; a stack of experts has a matrix for each."""
    own = [t for t in spec.tensors() if t.part == "language" and t.kind in kinds(name)]
    pieces = own[0].shape[0] if own and name.startswith("expert_") else 1
    numel = sum(t.numel for t in own)
    return OfModel(frozenset(t.name for t in own), numel, pieces, sum(spec.shard_numel(t, tp) for t in own))


def classes(facts: Facts, job: Job) -> Iterator[Violation]:
    """A class has the tensors of its kinds, and every language tensor is in one class."""
    layout = facts.plan.summary.layout
    listed = Counter(kind for c in layout.classes for kind in kinds(c.name))
    for kind in sorted({t.kind for t in job.spec.tensors() if t.part == "language"}):
        if listed[kind] != 1:
            yield Violation("layout-cases", f"{listed[kind]} classes have the {kind} tensors", where="layout")
    lies = {t.name: (t.case, t.slabs) for t in layout.tensors}
    for c in layout.classes:
        own = of_model(job.spec, c.name, job.rollout_tp)
        yield from _figures(c, own, job.itemsize)
        dealt = job.degrees(job.policy).ep if c.name in EXPERTS else 1
        right = (c.case, c.slabs * c.pieces // dealt)
        for name in sorted(n for n in own.names if lies.get(n, right) != right):
            case, slabs = lies[name]
            what = f"case {case} in {slabs} slabs, its class {c.name} is case {right[0]} in {right[1]}"
            yield Violation("layout-class", what, where=name)


def _figures(c: LayoutClass, own: OfModel, itemsize: int) -> Iterator[Violation]:
    right = {
        "tensors": len(own.names),
        "params": own.params,
        "pieces": own.pieces,
        "shard_bytes": own.shard * itemsize,
    }
    for what, value in right.items():
        if getattr(c, what) != value:
            yield Violation("layout-class", f"{what} {getattr(c, what):,}, the model gives it {value:,}", where=c.name)
    if (c.slabs > 1) != (c.view == "slabs"):
        yield Violation("layout-class", f"{c.slabs} slabs, it lies as {c.view}", where=c.name)


def towers(facts: Facts, job: Job) -> Iterator[Violation]:
    """The vision tower is replicated: each of its tensors is one slab."""
    names = {t.name for t in job.spec.tensors() if t.part == "vision"}
    for t in facts.plan.summary.layout.tensors:
        if t.name in names and t.slabs != 1:
            yield Violation("layout-class", f"{t.slabs} slabs, the tower is replicated", where=t.name)


def order(facts: Facts, job: Job) -> Iterator[Violation]:
    """The row order is the job's, as is q; needs are those of the classes."""
    layout = facts.plan.summary.layout
    for what, told, asked in (("row order", layout.order, job.layout.order), ("q", layout.q, job.q)):
        if told != asked:
            yield Violation("asked", f"{what} {told}, the job's is {asked}", where="layout")
    needs = tuple(dict.fromkeys(c.needs for c in layout.classes if c.needs))
    if layout.needs != needs:
        yield Violation("layout-class", "what engines must be taught is not what the classes need", where="layout")
    if set(layout.cases) != set(CASES):
        yield Violation("layout-cases", f"cases {', '.join(layout.cases) or 'none'}; there are three", where="layout")


def groups(facts: Facts, job: Job) -> Iterator[Violation]:
    """All training groups place their engines alike; apart from the trainer an engine's GPUs follow each other."""
    layout = facts.plan.summary.layout
    placed = sum(len(gpus) for gpus in layout.placement.values())
    gpus = job.gpus if job.shares_weights else placed
    if layout.groups * placed != gpus:
        what = f"{layout.groups} groups place engines on {placed} GPUs each, there are {gpus}"
        yield Violation("layout-placement", what, where="layout")
    if not job.shares_weights and [g for gpus in layout.placement.values() for g in gpus] != list(range(placed)):
        yield Violation("layout-placement", "ranks of the rollout pool do not follow each other", where="layout")


def tower_sent(facts: Facts, job: Job) -> Iterator[Violation]:
    """A tower is sent where it is trained, by the first of several pipeline stages."""
    told, trained = facts.plan.summary.layout.tower_bytes, "vision" in trained_parts(job, job.policy)
    if told and (job.stages == 1 or not trained or not job.spec.vision):
        what = f"{told:,} bytes of the tower are sent to other stages, which nothing changes there"
        yield Violation("layout-exchange", what, nbytes=told, where="layout")


def alternatives(facts: Facts, job: Job) -> Iterator[Violation]:
    """Each other order once, with all parameters, and a buffer of whole classes."""
    layout = facts.plan.summary.layout
    wanted = [o for o in ORDERS if o != job.layout.order] if layout.classes else []
    if sorted(a.order for a in layout.alternatives) != sorted(wanted):
        told = ", ".join(a.order for a in layout.alternatives) or "none"
        what = f"other row orders are {told}; for {job.layout.order} they are {', '.join(wanted) or 'none'}"
        yield Violation("layout-alternative", what, where="layout")
    for a in layout.alternatives:
        yield from _alternative(a, layout.classes, job)


def _alternative(a: LayoutAlternative, told: tuple[LayoutClass, ...], job: Job) -> Iterator[Violation]:
    params = {case: c.params for case, c in a.cases.items()}
    if sum(params.values()) != job.spec.language_parameters or set(params) != set(CASES):
        what = f"its cases have {sum(params.values()):,} parameters, the model {job.spec.language_parameters:,}"
        yield Violation("layout-alternative", what, where=a.order)
    for case, c in a.cases.items():
        if c.bytes != c.params * job.itemsize:
            what = f"case {case}: {c.params:,} parameters have {c.bytes:,} bytes"
            yield Violation("layout-alternative", what, where=a.order)
    sums, rebuilt, buffer = _sums(told), params.get("3", 0), a.case3_buffer_bytes
    if (rebuilt, buffer) not in sums:
        what = f"a buffer of {buffer:,} bytes for {rebuilt:,} parameters is not made of whole classes"
        yield Violation("layout-alternative", what, where=a.order)
    if params.get("2", 0) not in {held for held, _ in sums}:
        yield Violation("layout-alternative", "case 2 is not made of whole classes", where=a.order)


def _sums(told: tuple[LayoutClass, ...]) -> set[tuple[int, int]]:
    """Parameters and bytes of a rollout shard of every choice of classes; a model has ten."""
    found = {(0, 0)}
    for c in told[:MOST_CLASSES]:
        found |= {(params + c.params, nbytes + c.shard_bytes) for params, nbytes in found}
    return found


def check_weight_classes(facts: Facts, job: Job) -> Iterator[Violation]:
    """Everything in which the layout is not that of the job's model."""
    if facts.plan.summary.layout.classes:
        yield from classes(facts, job)
        yield from towers(facts, job)
    for check in (order, groups, tower_sent, alternatives):
        yield from check(facts, job)
