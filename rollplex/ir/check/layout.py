"""The layout adds up: cases to the language model, classes to buffer and exchange, engines to a partition of the GPUs.

    engine 0 on 0 2 4 6, engine 1 on 1 3 5 7      q = 2: GPU g is rank g // 2 of its engine, where its own slab lies
Source: paper section 3.3.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from rollplex.ir.check.facts import Facts
from rollplex.ir.check.rules import Violation
from rollplex.ir.check.update import LARGEST_PAGE
from rollplex.ir.errors import JobError
from rollplex.ir.models import ModelSpec, load_model, spec_from_config
from rollplex.ir.planned_layout import LayoutClass, LayoutSummary
from rollplex.ir.steps import Rebuild

CASE_OF = {"alias": 1, "slabs": 1, "interleave": 1, "reindex": 1, "transpose": 2, "rebuild": 3}
REORDERED = ("interleave", "reindex")
CASE3 = ".case3"


def _of_case(layout: LayoutSummary, case: int) -> list[LayoutClass]:
    return [c for c in layout.classes if c.case == case]


def cases(facts: Facts) -> Iterator[Violation]:
    """Each case has the parameters of its classes, all cases together those of the language model."""
    layout = facts.plan.summary.layout
    for key, told in layout.cases.items():
        params = sum(c.params for c in layout.classes if str(c.case) == key)
        if told.params != params:
            what = f"case {key} has {told.params:,} parameters, its classes have {params:,}"
            yield Violation("layout-cases", what, where="layout")
    total = sum(c.params for c in layout.cases.values())
    for c in layout.cases.values():
        if c.bytes * total != c.params * sum(o.bytes for o in layout.cases.values()):
            yield Violation("layout-cases", "bytes of the cases are not in proportion to parameters", where="layout")
            break
    yield from _model(facts, total)


def _model(facts: Facts, total: int) -> Iterator[Violation]:
    match facts.plan.job:
        case {"model": {"name": str(name), **rest}} if isinstance(rest.get("config"), dict | None):
            try:
                parameters = _spec(name, json.dumps(rest.get("config"), sort_keys=True)).language_parameters
            except JobError as err:
                yield Violation("layout-cases", f"no such model: {err}", where="layout")
                return
            if total != parameters:
                what = f"the cases have {total:,} parameters, the language model has {parameters:,}"
                yield Violation("layout-cases", what, where="layout")


@lru_cache(maxsize=64)
def _spec(name: str, config: str) -> ModelSpec:
    found: Any = json.loads(config)
    return load_model(name) if found is None else spec_from_config(found, name, "model.config")


def _model_of(facts: Facts) -> ModelSpec | None:
    """The job's model; None where there is no such model, which `_model` tells."""
    match facts.plan.job:
        case {"model": {"name": str(name), **rest}} if isinstance(rest.get("config"), dict | None):
            try:
                return _spec(name, json.dumps(rest.get("config"), sort_keys=True))
            except JobError:
                return None
        case _:
            return None


def _tensor_names(facts: Facts) -> set[str]:
    """Parameters of the job's model."""
    spec = _model_of(facts)
    return {t.name for t in spec.tensors()} if spec else set()


def tensors(facts: Facts) -> Iterator[Violation]:
    """Tensors are listed by the case of their class; what no class has is replicated, in case 1."""
    layout = facts.plan.summary.layout
    for name, count in Counter(t.name for t in layout.tensors).items():
        if count > 1:
            yield Violation("layout-cases", f"{name} is listed {count} times", where="layout")
    for name in sorted({t.name for t in layout.tensors} ^ _tensor_names(facts) if layout.tensors else ()):
        yield Violation("layout-cases", f"{name} is in the list or in the model, not in both", where="layout")
    listed = Counter(t.case for t in layout.tensors)
    for case in (2, 3):
        if listed[case] != sum(c.tensors for c in _of_case(layout, case)):
            yield Violation("layout-cases", f"{listed[case]} tensors are listed in case {case}", where="layout")
    if listed[1] < sum(c.tensors for c in _of_case(layout, 1)):
        yield Violation("layout-cases", f"only {listed[1]} tensors are listed in case 1", where="layout")


def views(facts: Facts) -> Iterator[Violation]:
    """How a class lies says its case and its buffer; the stock order re-indexes nothing."""
    layout = facts.plan.summary.layout
    for c in layout.classes:
        if CASE_OF[c.view] != c.case:
            yield Violation("layout-view", f"{c.name} lies as {c.view}, and is in case {c.case}", where=c.name)
        if layout.order == "stock" and c.view in REORDERED:
            yield Violation("layout-view", f"{c.name} lies as {c.view} in the stock order", where=c.name)
        if c.buffer_bytes != (c.shard_bytes if c.case == 3 else 0):
            what = f"{c.name} is in case {c.case} and has a buffer of {c.buffer_bytes:,} bytes"
            yield Violation("layout-buffer", what, nbytes=c.buffer_bytes, where=c.name)


def buffer(facts: Facts) -> Iterator[Violation]:
    """The buffer holds the shards of case 3, and is the object that is rebuilt, rounded up to pages."""
    layout = facts.plan.summary.layout
    told, needed = layout.case3_buffer_bytes, sum(c.buffer_bytes for c in layout.classes)
    if told != needed:
        yield Violation("layout-buffer", f"the buffer has {told:,} bytes, its classes need {needed:,}", nbytes=needed)
    # Beside adapters it is frozen, and made once: nothing rebuilds it.
    rebuilt = {at.step.object for at in facts.steps() if isinstance(at.step, Rebuild)}
    rebuilt |= {o.name for o in facts.objects.values() if o.role in facts.adapted and o.name.endswith(CASE3)}
    if told and not rebuilt and any(facts.objects[name].readers for name in facts.bases):
        yield Violation("layout-buffer", f"no object holds the buffer of {told:,} bytes", nbytes=told, where="layout")
    for o in (facts.objects[name] for name in sorted(rebuilt)):
        if not 0 <= o.bytes - told < LARGEST_PAGE:
            what = f"{o.name} has {o.bytes:,} bytes, the layout's buffer {told:,}"
            yield Violation("layout-buffer", what, object=o.name, nbytes=told, where=o.name)


def exchange(facts: Facts) -> Iterator[Violation]:
    """What a GPU receives is summed over the classes; no class receives more than its shard, or from nobody."""
    layout = facts.plan.summary.layout
    received = sum(c.receives_bytes for c in layout.classes)
    if received != layout.exchange_bytes_per_gpu:
        what = f"a GPU receives {received:,} bytes by class and {layout.exchange_bytes_per_gpu:,} in all"
        yield Violation("layout-exchange", what, nbytes=received, where="layout")
    for c in layout.classes:
        if c.receives_bytes > c.shard_bytes:
            what = f"{c.name} receives {c.receives_bytes:,} bytes for a shard of {c.shard_bytes:,}"
            yield Violation("layout-exchange", what, nbytes=c.receives_bytes, where=c.name)
        yield from _gathered(facts, c)
    most = max(layout.exchange_bytes_per_gpu, layout.tower_bytes, received + layout.tower_bytes)
    if layout.between_nodes_bytes > most or (layout.between_nodes_bytes and not _spans_nodes(facts)):
        what = f"{layout.between_nodes_bytes:,} bytes come from other nodes, a GPU receives {most:,} in all"
        yield Violation("layout-exchange", what, nbytes=layout.between_nodes_bytes, where="layout")


def _gathered(facts: Facts, c: LayoutClass) -> Iterator[Violation]:
    """q ranks of every stage have a rollout shard together, of experts those of every EP rank; K and V repeat on more.

    What is whole on every rank, or never changes, is not gathered.
    """
    train, q = facts.plan.processes.get("train"), facts.plan.summary.layout.q
    if train is None:
        return
    ways = q * train.pipeline_parallel * (train.expert_parallel if c.name.startswith("expert_") else 1)
    alone = c.group == 1 and not c.receives_bytes
    wider = c.name == "qkv" and _repeats(facts, train.tensor_parallel)
    legal = c.group in _widths(ways, train.tensor_parallel // max(q, 1)) if wider else c.group == ways
    if not (legal or alone) or (c.receives_bytes and c.group < 2):
        what = f"{c.name} is gathered over {c.group} GPUs, its shard is in pieces on {ways}"
        yield Violation("layout-exchange", what, nbytes=c.receives_bytes, where=c.name)


def _repeats(facts: Facts, tensor_parallel: int) -> bool:
    """Whether several ranks of the trainer have the same KV heads."""
    spec = _model_of(facts)
    return spec is not None and tensor_parallel > 0 and spec.kv_heads % tensor_parallel != 0


def _widths(ways: int, times: int) -> list[int]:
    """The shard's own pieces, or as many times of them as divide the trainer's ranks."""
    return [ways * n for n in range(1, times + 1) if times % n == 0]


def _spans_nodes(facts: Facts) -> bool:
    match facts.plan.job:
        case {"cluster": {"nodes": int(nodes)}}:
            return nodes > 1
        case _:
            return False


def placement(facts: Facts) -> Iterator[Violation]:
    """The engines are on as many GPUs as they have ranks, and share none."""
    layout = facts.plan.summary.layout
    placed = sorted(g for gpus in layout.placement.values() for g in gpus)
    if placed != list(range(len(placed))):
        yield Violation("layout-placement", f"the engines are on GPUs {_list(placed)}", where="layout")
    rollout = facts.plan.processes.get("rollout")
    for name, gpus in layout.placement.items():
        if rollout and len(gpus) != rollout.tensor_parallel:
            what = f"{name} is on {len(gpus)} GPUs, its TP is {rollout.tensor_parallel}"
            yield Violation("layout-placement", what, where=name)


def slabs_at_hand(facts: Facts) -> Iterator[Violation]:
    """q engines on the GPUs of a training group, each rank where its shard's slabs are: g // q."""
    layout = facts.plan.summary.layout
    if len(layout.placement) != layout.q:
        what = f"{len(layout.placement)} engines share the GPUs of a training group, q is {layout.q}"
        yield Violation("layout-placement", what, where="layout")
    for name, gpus in layout.placement.items():
        for r, g in enumerate(gpus):
            if g // max(layout.q, 1) != r:
                what = f"rank {r} of {name} is on GPU {g}, whose slab lies in the shard of rank {g // max(layout.q, 1)}"
                yield Violation("layout-placement", what, where=name)


def _list(gpus: list[int]) -> str:
    return " ".join(map(str, gpus)) or "none"


def apart(facts: Facts) -> Iterator[Violation]:
    """Where no weights are shared nothing is in any case, and the GPUs of a node have as many engines as they hold."""
    layout = facts.plan.summary.layout
    if (
        layout.classes
        or layout.tensors
        or layout.case3_buffer_bytes
        or any(c.params or c.bytes for c in layout.cases.values())
    ):
        yield Violation("layout-cases", "weights are in a layout case, and nothing is shared", where="layout")
    if told := layout.tower_bytes + layout.between_nodes_bytes:
        what = f"{told:,} bytes are told of the exchange of a shared snapshot, and nothing is shared"
        yield Violation("layout-exchange", what, nbytes=told, where="layout")
    yield from _by_node(facts, layout)


def _by_node(facts: Facts, layout: LayoutSummary) -> Iterator[Violation]:
    """Engines that share nothing fill a node one after the other."""
    rollout = facts.plan.processes.get("rollout")
    match facts.plan.job:
        case {"cluster": {"gpus_per_node": int(gpus)}} if rollout:
            engines = min(gpus, rollout.ranks) // max(rollout.tensor_parallel, 1)
            if len(layout.placement) != engines:
                what = f"{len(layout.placement)} engines are placed on a node, it has {engines}"
                yield Violation("layout-placement", what, where="layout")
    for name, placed in layout.placement.items():
        if list(placed) != list(range(placed[0], placed[0] + len(placed)) if placed else ()):
            yield Violation(
                "layout-placement", f"{name} is on GPUs {_list(list(placed))}, not side by side", where=name
            )


def check_layout(facts: Facts) -> Iterator[Violation]:
    """Everything in which the layout does not add up."""
    shared = len(facts.plan.summary.pools) == 1 and facts.plan.summary.layout.q > 0
    checks = (cases, tensors, views, buffer, exchange, slabs_at_hand) if shared else (apart,)
    for check in (*checks, placement):
        yield from check(facts)
