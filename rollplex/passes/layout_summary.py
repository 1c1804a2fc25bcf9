"""What a plan says of a solved layout: cases, buffer, exchange by class, placement, what other orders would give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollplex.ir.job import Job
from rollplex.ir.job_schema import LayoutOrder
from rollplex.ir.lora import served_bytes, serves_adapters
from rollplex.ir.plan import SolverResult
from rollplex.ir.planned_layout import CaseBytes, LayoutAlternative, LayoutClass, LayoutSummary, TensorPlacement
from rollplex.ir.work import trains_vision
from rollplex.passes.costs import Costs
from rollplex.passes.gather import Gather, Gathered
from rollplex.passes.layout_options import CASE, Option, WeightClass

FIXED_ORDERS: tuple[LayoutOrder, ...] = ("stock", "reindex")


@dataclass(frozen=True)
class Decision:
    """A solved row order: options by class, GPUs of every rollout engine of one training group."""

    classes: tuple[WeightClass, ...]
    chosen: Mapping[str, Option]
    placement: dict[str, tuple[int, ...]]
    solvers: tuple[SolverResult, ...]

    def summaries(self, gather: Gather) -> tuple[LayoutClass, ...]:
        """The classes as a plan lists them."""
        return tuple(layout_class(p.weights, self.chosen[p.weights.name], gather.of(p)) for p in gather.pieces)


def layout_class(c: WeightClass, o: Option, part: Gathered) -> LayoutClass:
    """A class as it is printed, with its part of the exchange."""
    return LayoutClass(
        name=c.name, view=o.view, case=CASE[o.view], tensors=len(c.tensors), params=sum(t.numel for t in c.tensors),
        slabs=o.slabs, pieces=c.pieces, shard_bytes=c.shard_bytes, buffer_bytes=o.buffer_bytes,
        group=part.group, sends_bytes=part.sends_bytes, receives_bytes=part.receives_bytes,
        decode_s=round(o.decode_s, 6), rebuild_s=round(o.rebuild_s, 6), needs=o.needs, why=o.why,
    )  # fmt: skip


def case_bytes(classes: Sequence[LayoutClass], itemsize: int) -> dict[str, CaseBytes]:
    """Parameters and bytes of every case over the whole language model."""
    params = {k: sum(c.params for c in classes if c.case == k) for k in (1, 2, 3)}
    return {str(k): CaseBytes(params=n, bytes=n * itemsize) for k, n in params.items()}


def _alternative(job: Job, order: LayoutOrder, found: Decision, gather: Gather) -> LayoutAlternative:
    classes = found.summaries(gather)
    return LayoutAlternative(
        order=order,
        cases=case_bytes(classes, job.itemsize),
        case3_buffer_bytes=sum(c.buffer_bytes for c in classes),
        seconds=round(sum(c.decode_s + c.rebuild_s for c in classes), 6),
    )


def summarise(job: Job, found: Decision, others: Mapping[LayoutOrder, Decision]) -> LayoutSummary:
    """Cases over the whole model, buffer and exchange for one GPU, the placement of ranks, what other orders give."""
    gather = Gather(job, found.classes)  # what ranks own depends on no row order
    classes = found.summaries(gather)
    tower = [TensorPlacement(name=t.name, case=1, why="replicated") for t in job.spec.tensors() if t.part == "vision"]
    return LayoutSummary(
        q=job.q,
        order=job.layout.order,
        cases=case_bytes(classes, job.itemsize),
        case3_buffer_bytes=sum(c.buffer_bytes for c in classes),
        exchange_bytes_per_gpu=sum(c.receives_bytes for c in classes),
        tower_bytes=gather.tower_bytes,
        between_nodes_bytes=gather.between_nodes_bytes,
        exchange_s=round(gather.seconds, 6),
        placement=found.placement,
        groups=job.gpus // job.train_tp,
        classes=classes,
        needs=tuple(dict.fromkeys(c.needs for c in classes if c.needs)),
        alternatives=tuple(_alternative(job, order, other, gather) for order, other in others.items()),
        tensors=(*tower, *_tensors(found, gather)),
    )


def nothing_shared(job: Job) -> LayoutSummary:
    """Weights of their own: no case applies, and a GPU that rolls out receives its whole shard after an update."""
    none = CaseBytes(params=0, bytes=0)
    engines = min(job.cluster.gpus_per_node, job.rollout_gpus) // job.rollout_tp
    received = job.spec.rank_parameters(job.rollout_tp, "language") * job.itemsize
    if trains_vision(job, job.policy):
        received += job.spec.vision_parameters * job.itemsize
    sent, costs = served_bytes(job) if serves_adapters(job) else received, Costs(job)
    return LayoutSummary(
        q=job.q,
        order=job.layout.order,
        cases={str(k): none for k in (1, 2, 3)},
        case3_buffer_bytes=0,
        exchange_bytes_per_gpu=sent,
        exchange_s=round(costs.refresh_s() if job.disaggregated else costs.exchange_s(sent), 6),
        placement={f"engine {e}": tuple(range(e * job.rollout_tp, (e + 1) * job.rollout_tp)) for e in range(engines)},
        groups=1,
        classes=(),
        needs=(),
        alternatives=(),
        tensors=(),
    )


def _tensors(found: Decision, gather: Gather) -> list[TensorPlacement]:
    """A rank's slabs of a stack of experts are those of the experts that are dealt to it."""
    return [
        TensorPlacement(name=t.name, case=CASE[o.view], slabs=o.slabs * p.weights.pieces // p.ways, why=o.why)
        for p, o in ((p, found.chosen[p.weights.name]) for p in gather.pieces)
        for t in p.weights.tensors
    ]
