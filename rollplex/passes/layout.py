"""Where each actor tensor lies so that trainer and rollout engine read one physical copy (paper section 3.3).

    case 1  alias      the training shard is one slab of the rollout shard (or one slab a part, as gate and up)
    case 2  transpose  a row-parallel [O, I] weight stored as [I, O], so that every shard along I is one slab
    case 3  rebuild    orders differ: the rollout engine reads a buffer that is copied and permuted in P3

Data        c       weight class (qkv, gate_up, o, down, ..)     o      option of a class, from the engines' row orders
            B[c,o]  buffer bytes a GPU                           T[c,o] bytes a GPU moves for layout in a step
            g       GPU of a training group, = training rank     e, R   rollout engine, rank within it;  q = TP_t / TP_r
Variables   x[c,o]  class c takes option o                       y[g,e,R]  GPU g hosts rollout rank R of engine e
Constraints (1)  sum_o x[c,o] = 1                   for each c
            (2)  sum_{e,R} y[g,e,R] = 1             for each g
            (3)  sum_g y[g,e,R] = 1                 for each e, R
            (4)  y[g,e,R] = 0 unless R = g // q     (training rank g owns a slab of rollout rank g // q only)
Objective   buffer bytes, then layout work, then engine order: sum |e - g mod q| y[g,e,R]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ortools.sat.python import cp_model

from rollplex.backends.facts import Block, EngineFacts, load_facts
from rollplex.ir.errors import PassError
from rollplex.ir.job import Job
from rollplex.ir.models import ModelSpec, Tensor
from rollplex.ir.module import Module
from rollplex.ir.plan import CaseBytes, LayoutSummary, SolverResult, TensorPlacement
from rollplex.passes.solver import Objective, Solution, minimise
from rollplex.passes.work import trains_vision

FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "q_bias": "qkv", "k_bias": "qkv", "v_bias": "qkv"}
FUSED |= {"gate": "gate_up", "up": "gate_up"}
CASE: dict[str, Literal[1, 2, 3]] = {"alias": 1, "slabs": 1, "transpose": 2, "rebuild": 3}


@dataclass(frozen=True)
class Option:
    """One way to store a weight class."""

    name: str
    why: str
    buffer_bytes: int = 0
    work_bytes: int = 0


@dataclass(frozen=True)
class WeightClass:
    """Tensors that an engine fuses or stores alike, over all layers."""

    name: str
    tensors: tuple[Tensor, ...]
    shard_bytes: int
    sharded: bool
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Layout:
    """The chosen option of every weight class, the rank placement, and what an update must exchange."""

    made_by: ClassVar[str] = "layout"
    summary: LayoutSummary
    solvers: tuple[SolverResult, ...]

    def __str__(self) -> str:
        total = sum(c.params for c in self.summary.cases.values())
        shares = "  ".join(f"case {k} {100 * c.params / total:.1f} %" for k, c in self.summary.cases.items())
        buffer, exchange = self.summary.case3_buffer_bytes / 2**30, self.summary.exchange_bytes_per_gpu / 2**30
        return f"layout  {shares}  buffer {buffer:.2f} GiB  exchange {exchange:.2f} GiB a GPU"


def contiguous(inner: Sequence[Block], outer: Sequence[Block]) -> bool:
    """Whether the training shard's rows are one run of the rollout shard's rows, in the same order."""
    want, have = _merge(inner), list(outer)
    for start in range(len(have)):
        for stop in range(start + 1, len(have) + 1):
            if _covers(_merge(have[start:stop]), want):
                return True
    return False


def _covers(have: list[Block], want: list[Block]) -> bool:
    """One contiguous run: equal inside, the first may begin later and the last may end earlier."""
    if [b.part for b in have] != [b.part for b in want]:
        return False
    inner = range(1, len(have) - 1)
    if len(have) == 1:
        return have[0].start <= want[0].start and want[0].stop <= have[0].stop
    ends = have[0].stop == want[0].stop and have[0].start <= want[0].start
    ends &= have[-1].start == want[-1].start and want[-1].stop <= have[-1].stop
    return ends and all(have[i] == want[i] for i in inner)


def _merge(blocks: Iterable[Block]) -> list[Block]:
    """Join blocks that continue each other."""
    out: list[Block] = []
    for block in blocks:
        if out and out[-1].part == block.part and out[-1].stop == block.start:
            out[-1] = Block(block.part, out[-1].start, block.stop)
        else:
            out.append(block)
    return out


def one_slab_a_part(inner: Sequence[Block], outer: Sequence[Block]) -> bool:
    """Whether each part of the training shard is one run of the same part of the rollout shard."""
    merged = _merge(inner)
    parts = {b.part for b in merged}
    return len(merged) == len(parts) and all(contiguous([b], outer) for b in merged)


def fused_options(job: Job, trainer: EngineFacts, roller: EngineFacts, fused: str, shard_bytes: int) -> list[Option]:
    """Options of a weight that engines fuse, from their row orders on every training rank of one rollout shard."""
    tp_t, tp_r = job.train_tp, job.rollout_tp
    pairs = [
        (trainer.rows(job.spec, fused, tp_t, g), roller.rows(job.spec, fused, tp_r, g // job.q)) for g in range(tp_t)
    ]
    if all(contiguous(inner, outer) for inner, outer in pairs):
        return [Option("alias", "same row order, nested shards")]
    options = [Option("rebuild", f"{fused} rows are ordered differently by the engines", shard_bytes, 2 * shard_bytes)]
    if fused in trainer.split_views and all(one_slab_a_part(inner, outer) for inner, outer in pairs):
        options.insert(0, Option("slabs", "one slab a part: the trainer holds gate and up as two views"))
    return options


def plain_options(job: Job, trainer: EngineFacts, roller: EngineFacts, tensor: Tensor, nbytes: int) -> list[Option]:
    """Options of a weight that is stored alone."""
    if tensor.axis is None:
        return [Option("alias", "replicated")]
    if job.q == 1:
        return [Option("alias", "identical shards")]
    if tensor.axis == 0:
        return [Option("alias", "nested row ranges")]
    options = [Option("rebuild", "the sharded axis is innermost", nbytes, 2 * nbytes)]
    if trainer.transposed and roller.transposed and len(tensor.shape) == 2:
        options.insert(0, Option("transpose", "row-parallel, stored [I, O]", 0, nbytes))
    return options


def weight_classes(job: Job) -> list[WeightClass]:
    """The language model's weights by class; the vision tower is replicated and aliases as it is."""
    policy = job.roles[job.policy]
    assert policy.train is not None
    assert policy.rollout is not None
    trainer, roller = load_facts(policy.train.engine), load_facts(policy.rollout.engine)
    groups: dict[str, list[Tensor]] = {}
    for tensor in job.spec.tensors():
        if tensor.part == "language":
            groups.setdefault(FUSED.get(tensor.kind, tensor.kind), []).append(tensor)
    return [_weight_class(job, trainer, roller, name, tensors) for name, tensors in groups.items()]


def _weight_class(job: Job, trainer: EngineFacts, roller: EngineFacts, name: str, tensors: list[Tensor]) -> WeightClass:
    nbytes = sum(job.spec.shard_numel(t, job.rollout_tp) for t in tensors) * job.itemsize
    if name in FUSED.values():
        options = fused_options(job, trainer, roller, name, nbytes)
    else:
        options = plain_options(job, trainer, roller, tensors[0], nbytes)
    return WeightClass(name, tuple(tensors), nbytes, tensors[0].axis is not None, tuple(options))


@dataclass(frozen=True)
class Variables:
    """x[c,o] and y[g,e,R] of the docstring."""

    x: dict[tuple[str, str], cp_model.IntVar]
    y: dict[tuple[int, int, int], cp_model.IntVar]


def build(classes: Sequence[WeightClass], tp_t: int, tp_r: int) -> tuple[cp_model.CpModel, Variables, list[Objective]]:
    """The CP-SAT model of the docstring."""
    model, q = cp_model.CpModel(), tp_t // tp_r
    x = {(c.name, o.name): model.new_bool_var(f"x[{c.name},{o.name}]") for c in classes for o in c.options}
    slots = [(e, r) for e in range(q) for r in range(tp_r)]
    y = {(g, e, r): model.new_bool_var(f"y[{g},{e},{r}]") for g in range(tp_t) for e, r in slots}
    for c in classes:  # (1)
        model.add_exactly_one(x[c.name, o.name] for o in c.options)
    for g in range(tp_t):  # (2)
        model.add_exactly_one(y[g, e, r] for e, r in slots)
    for e, r in slots:  # (3)
        model.add_exactly_one(y[g, e, r] for g in range(tp_t))
    for (g, _, r), literal in y.items():  # (4)
        if r != g // q:
            model.add(literal == 0)
    kib = [(x[c.name, o.name], o.buffer_bytes >> 10, o.work_bytes >> 10) for c in classes for o in c.options]
    objectives = [
        Objective("buffer bytes", sum(b * lit for lit, b, _ in kib), 1024),
        Objective("layout bytes moved", sum(w * lit for lit, _, w in kib), 1024),
        Objective("engine order", sum(abs(e - g % q) * lit for (g, e, _), lit in y.items())),
    ]
    return model, Variables(x, y), objectives


def summarise(job: Job, classes: Sequence[WeightClass], v: Variables, solution: Solution) -> LayoutSummary:
    """Cases over the whole model, buffer and exchange for one GPU, and the placement of ranks."""
    chosen = {c.name: next(o for o in c.options if solution.true(v.x[c.name, o.name])) for c in classes}
    cases = {str(k): CaseBytes(params=0, bytes=0) for k in (1, 2, 3)}
    tensors = [TensorPlacement(name=t.name, case=1, why="replicated") for t in _vision(job.spec)]
    for c in classes:
        case = CASE[chosen[c.name].name]
        params = sum(t.numel for t in c.tensors)
        before = cases[str(case)]
        cases[str(case)] = CaseBytes(params=before.params + params, bytes=before.bytes + params * job.itemsize)
        tensors += [TensorPlacement(name=t.name, case=case, why=chosen[c.name].why) for t in c.tensors]
    sharded = sum(c.shard_bytes for c in classes if c.sharded)
    return LayoutSummary(
        q=job.q,
        order="stock",
        cases=cases,
        case3_buffer_bytes=sum(chosen[c.name].buffer_bytes for c in classes),
        exchange_bytes_per_gpu=sharded * (job.q - 1) // job.q,
        placement={
            f"engine {e}": tuple(
                g for r in range(job.rollout_tp) for g in range(job.train_tp) if solution.true(v.y[g, e, r])
            )
            for e in range(job.q)
        },
        tensors=tuple(tensors),
    )


def nothing_shared(job: Job) -> LayoutSummary:
    """Pools of their own: no case applies, and a GPU of the rollout pool receives its whole shard after an update."""
    none = CaseBytes(params=0, bytes=0)
    engines = min(job.cluster.gpus_per_node, job.rollout_gpus) // job.rollout_tp
    received = job.spec.rank_parameters(job.rollout_tp, "language")
    if trains_vision(job, job.policy):
        received += job.spec.vision_parameters
    return LayoutSummary(
        q=job.q,
        order="stock",
        cases={str(k): none for k in (1, 2, 3)},
        case3_buffer_bytes=0,
        exchange_bytes_per_gpu=received * job.itemsize,
        placement={f"engine {e}": tuple(range(e * job.rollout_tp, (e + 1) * job.rollout_tp)) for e in range(engines)},
        tensors=(),
    )


def _vision(spec: ModelSpec) -> list[Tensor]:
    return [t for t in spec.tensors() if t.part == "vision"]


@dataclass(frozen=True)
class LayoutPass:
    """Classify every actor tensor as alias, transpose or rebuild, and place rollout ranks on training GPUs.

    Job keys: `layout`, `model`, `roles`, `solver`.
    """

    name: ClassVar[str] = "layout"
    needs: ClassVar[tuple[type, ...]] = ()
    makes: ClassVar[type] = Layout

    def run(self, module: Module) -> Module:
        """Solve the layout of the job's actor; see the module's docstring."""
        job = module.job
        if job.disaggregated:
            return module.put(Layout(nothing_shared(job), ()))
        classes = weight_classes(job)
        model, variables, objectives = build(classes, job.train_tp, job.rollout_tp)
        solution = minimise(model, self.name, objectives, seconds=job.solver.seconds, seed=job.solver.seed)
        if solution is None:
            raise PassError("no placement of training and rollout ranks shares a slab on every GPU")
        return module.put(Layout(summarise(job, classes, variables, solution), solution.results))
