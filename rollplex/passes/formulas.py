"""The formula of an object's bytes, from its plan: what `explain` says of its size, in words with the numbers in.

formula_of(plan, job, "actor.boundary")     8 prompts x 8192 tokens x 64 layers x 2 x 1 KV heads x 128 x 2 B

A formula is written from the maths and knows nothing of how the plan was sized: it is told only where it comes to
the bytes that the plan has, in whole pages. An object that has none, or another size, is not explained in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from rollplex.ir.formula import Formula, largest, n, part, up
from rollplex.ir.hardware import COMMUNICATOR_MIB, CONTEXT_MIB, FIRST_COMMUNICATOR_MIB
from rollplex.ir.job import Job
from rollplex.ir.lora import trained_parts
from rollplex.ir.plan import Plan
from rollplex.ir.serving import all_reduce_bytes, budget
from rollplex.ir.shards import EXPERTS, Degrees, stages_of
from rollplex.ir.sizes import gib_to_nbytes
from rollplex.ir.spec import ModelSpec, Part, Tensor
from rollplex.ir.work import Work, one_response, role_work, whole_call
from rollplex.passes.formulas_fsdp import LOGITS, fsdp_score, fsdp_train
from rollplex.passes.formulas_work import (
    boundary,
    megatron_prefix,
    megatron_saved,
    megatron_score,
    megatron_train,
    megatron_whole,
    patches_bytes,
)
from rollplex.passes.work import between_nodes, communicators

MIB = n(2**20, "B")


def formula_of(plan: Plan, job: Job, name: str) -> Formula | None:
    """The formula of an object where it comes to the plan's bytes; None where there is none, or it does not."""
    found, page = Formulas(plan, job).of(name), job.device.page_bytes
    planned = plan.object(name).bytes
    return found if found is not None and -(-found.value // page) * page == planned else None


class Formulas:
    """The formulas of one plan's objects."""

    def __init__(self, plan: Plan, job: Job) -> None:
        self.plan, self.job = plan, job

    def of(self, name: str) -> Formula | None:
        """By the object's name; a trained role's states are named alike for every role."""
        owner, _, what = name.partition(".")
        whole: dict[str, Callable[[], Formula | None]] = {
            "rollout.kv": self.kv, "rollout.runtime": self.runtime, "rollout.weights": self.rollout_shard,
            "rollout.vision": self.rollout_tower, "rollout.carried": self.carried,
            "optimizer.workspace": lambda: self.chunks(self.job.policy),
            "train.activations": lambda: self.training(self.job.policy),
        }  # fmt: skip
        if name in whole:
            return whole[name]()
        if what == "context":
            return self.context(owner)
        return self.of_role(owner, what) if owner in self.job.roles else None

    def of_role(self, role: str, what: str) -> Formula | None:
        """An object that a role has for itself."""
        states = {"gradients": 1, "master": 1, "moments": 2}
        if what in states:
            return self.state(role, states[what], mine=what != "gradients" or self.job.zero(role) > 1)
        if what in ("snapshot", "weights"):
            shared = what == "snapshot" and role == self.job.policy and self.plan.object(f"{role}.snapshot").readers
            return self.rollout_shard() if shared else self.weights(role, "language")
        made: dict[str, Callable[[str], Formula | None]] = {
            "vision": lambda r: self.weights(r, "vision"), "case3": lambda r: self.case3(), "adam": self.adam,
            "boundary": self.boundary, "prefix_saved": self.saved, "prefix_workspace": self.prefix,
            "score_workspace": self.score, "activations": self.training, "optimizer_workspace": self.chunks,
        }  # fmt: skip
        return made[what](role) if what in made else None

    # ---- weights and states

    @property
    def item(self) -> Formula:
        """Bytes of an element of the model's dtype."""
        return n(self.job.itemsize, "B")

    @property
    def wide(self) -> Formula:
        """Bytes of an element of gradients, master weights and moments."""
        return n(max(4, self.job.itemsize), "B")

    def rollout_shard(self) -> Formula:
        """Language weights of one rollout rank."""
        return held(self.job.spec, Degrees(self.job.rollout_tp), "language") * self.item

    def rollout_tower(self) -> Formula:
        """The rollout engine's own copy of the tower, whole or cut."""
        rollout = self.job.roles[self.job.policy].rollout
        ways = self.job.rollout_tp if rollout and rollout.mm_encoder_tp_mode == "weights" else 1
        return up(held(self.job.spec, Degrees(), "vision"), ways) * self.item

    def weights(self, role: str, piece: Part) -> Formula:
        """Weights of a part on one training rank; under ZeRO-3 a share, in FP32 where they are trained."""
        all_of, degrees = held(self.job.spec_of(role), self.job.degrees(role), piece), self.job.degrees(role)
        if self.job.zero(role) < 3:
            return all_of * self.item
        return up(all_of, degrees.replicas) * (self.wide if self.job.roles[role].train else self.item)

    def parameters(self, role: str, mine: bool) -> Formula:
        """Parameters that a role trains on a rank; `mine` are those whose states it keeps."""
        spec, degrees, parts = self.job.spec_of(role), self.job.degrees(role), trained_parts(self.job, role)
        return owned(spec, degrees, *parts) if mine and self.job.cuts_optimizer(role) else held(spec, degrees, *parts)

    def state(self, role: str, copies: int, mine: bool) -> Formula:
        """Gradients, master weights or moments."""
        each = self.parameters(role, mine) * self.wide
        return n(copies) * each if copies > 1 else each

    def adam(self, role: str) -> Formula:
        """What Adam allocates over the whole of a resident state."""
        whole = self.parameters(role, mine=True) * self.wide
        return n(2, "states") * whole if self.job.optimizer.joins_gradient else whole

    def chunks(self, role: str) -> Formula:
        """Optimizer chunks in flight: gradient, master weight and two moments, and what an unfused Adam adds."""
        summary, policy = self.plan.summary.chunks, role == self.job.policy
        elements = n((summary.optimizer if policy else summary.others[role]).elements, "parameters")
        window = next(
            w.name for w in self.plan.summary.windows if w.name in self.plan.object(f"{role}.moments").consumed
        )
        streamed = any(
            o.residency[window] == "host"
            for o in self.plan.summary.objects
            if o.name in {f"{role}.{state}" for state in ("master", "moments", "gradients")}
        )
        adam = elements * n(2, "states of Adam's") * self.wide
        if not streamed:
            return adam if self.job.on_host else n(self.job.device.page_bytes, "B: numbers of a step")
        several, every = (
            n(self.job.optimizer.in_flight, "chunks in flight") * elements,
            self.parameters(role, mine=True),
        )
        flying = (several if several.value < every.value else every) * n(4, "states") * self.wide
        return flying + adam if self.job.on_host else flying

    def case3(self) -> Formula:
        """Weights that the rollout engine holds in an order of its own."""
        rebuilt = {t.name for t in self.plan.summary.layout.tensors if t.case == 3}
        tensors = [t for t in self.job.spec.tensors() if t.name in rebuilt]
        return counted(self.job.spec, Degrees(self.job.rollout_tp), tensors) * self.item

    # ---- processes and the rollout engine

    def context(self, process: str) -> Formula:
        """CUDA context, and NCCL's buffers for its groups."""
        job, shared = self.job, bool(self.plan.object(f"{self.job.policy}.snapshot").readers)
        gathers = between_nodes(job, self.plan.summary.layout) if shared else ()
        groups = len(communicators(job, process, gathers))
        stated, nccl = job.cluster.context_gib, job.cluster.nccl_gib
        base = (
            n(CONTEXT_MIB, "MiB CUDA context") * MIB if stated is None else n(gib_to_nbytes(stated), "B CUDA context")
        )
        if not groups:
            return base
        more = n(groups - 1, "more groups") * n(COMMUNICATOR_MIB, "MiB")
        first = n(FIRST_COMMUNICATOR_MIB, "MiB first NCCL group")
        if nccl is not None:
            return base + n(gib_to_nbytes(nccl), "B of NCCL")
        own = all_reduce_bytes(job) if process == "rollout" else 0
        found = base + (first + more) * MIB
        return found + n(own, "B: the engine's own all-reduces") if own else found

    def kv(self) -> Formula:
        """The KV budget that the job states; under a share of memory what is left of that, in whole pages."""
        found, page = budget(self.job), self.job.device.page_bytes
        if found is None:
            return n(self.job.kv_cache_bytes, "B: the budget that the job states")
        weights = part("weights", self.rollout_shard() + self.rollout_tower())
        left = (
            n(found.share, "B: the engine's share")
            - weights
            - self.runtime()
            - part("context", self.context("rollout"))
        )
        return left // page * n(page, "B a page")

    def runtime(self) -> Formula:
        """Buffers that the job states, or a profile run's peak."""
        found = budget(self.job)
        said = (
            "B: the peak of the engine's profile run" if found else "B: the buffers that the job states or leaves to us"
        )
        return n(self.job.runtime_bytes, said)

    def carried(self) -> Formula:
        """Tokens of unfinished responses with log-probability and snapshot number."""
        job = self.job
        groups = min(job.prompts_per_engine, job.sampled - job.workload.prompts)
        tokens = n(job.workload.response_tokens, "tokens")
        return n(groups, "groups") * n(job.group, "responses") * tokens * n(12, "B")

    # ---- work

    def prompts(self, role: str) -> Formula:
        """Prompts whose prefix a rank keeps: of all groups, or of one where a prefix runs with its group."""
        name = "prompt at a time" if self.job.with_group(role) else "prompts"
        return n(self.job.boundaries_of(role), name)

    def boundary(self, role: str) -> Formula:
        """Keys and values of the prompts of one rank."""
        return self.prompts(role) * boundary(role_work(self.job, role))

    def saved(self, role: str) -> Formula | None:
        """Autograd state of the attached prefixes."""
        if self.job.trainer(role).engine != "megatron":
            return None
        return self.prompts(role) * part("a prompt", megatron_saved(role_work(self.job, role)))

    def prefix(self, role: str) -> Formula | None:
        """One prefix forward."""
        if self.job.trainer(role).engine != "megatron":
            return None
        return megatron_prefix(role_work(self.job, role), self.plan.object(f"{role}.boundary").attached)

    def score(self, role: str) -> Formula | None:
        """One suffix forward, or the whole call where that is not split."""
        work, engine, whole = self.work(role), self.job.trainer(role).engine, self.whole(role)
        if engine in LOGITS:
            found = fsdp_score(work, LOGITS[engine])
            return largest(found, patches_bytes(role_work(self.job, role), (5, 3))) if whole else found
        if engine != "megatron":
            return None
        prompt = megatron_prefix(role_work(self.job, role), attached=False)
        return largest(megatron_score(work), prompt) if whole else megatron_score(work)

    def training(self, role: str) -> Formula | None:
        """Forward and backward of a step, or under the naive overlap of one whole sequence."""
        engine = self.job.trainer(role).engine
        if self.plan.schedule == "naive":
            return megatron_whole(one_response(role_work(self.job, role))) if engine == "megatron" else None
        if engine in LOGITS:
            return fsdp_train(self.work(role), LOGITS[engine])
        if engine != "megatron":
            return None
        train = megatron_train(self.work(role))
        if not self.job.with_group(role):
            return train
        prefix = megatron_prefix(role_work(self.job, role), attached=True)
        return largest(part("train step", train), part("prefix", prefix))

    def whole(self, role: str) -> bool:
        """Whether the role's call runs prompt and response together."""
        return not any(o.name == f"{role}.boundary" for o in self.plan.summary.objects)

    def work(self, role: str) -> Work:
        """A step's work: as many responses as the plan takes at a time."""
        stated = self.job.trainer(role).microbatch if self.job.whole_sequences(role) else "auto"
        chosen = self.plan.summary.chunks.microbatch.suffix_responses
        work = one_response(role_work(self.job, role), chosen if stated == "auto" else stated)
        return whole_call(work) if self.whole(role) else replace(work, dropped=self.drops(role))

    def drops(self, role: str) -> bool:
        """Whether a prefix backward makes again what its prefix has not kept."""
        saved = (o for o in self.plan.summary.objects if o.name == f"{role}.prefix_saved")
        return any("dropped" in o.residency.values() for o in saved)


# ---- parameters


def held(spec: ModelSpec, degrees: Degrees, *parts: Part) -> Formula:
    """Parameters of these parts on the rank that holds most of them."""
    stages, parts = [_of_stage(spec, degrees, stage, parts) for stage in range(degrees.pp)], _there(spec, parts)
    most = max((counted(spec, degrees, tensors) for tensors in stages), key=lambda f: f.value)
    return part(f"{' and '.join(parts)} parameters of a rank", most)


def owned(spec: ModelSpec, degrees: Degrees, *parts: Part) -> Formula:
    """Parameters whose states a rank keeps when all ranks that repeat them share those out."""

    def share(tensors: list[Tensor]) -> Formula:
        dense = counted(spec, degrees, [t for t in tensors if t.kind not in EXPERTS])
        experts = counted(spec, degrees, [t for t in tensors if t.kind in EXPERTS])
        return up(dense, degrees.replicas) + up(experts * n(degrees.ep, "expert ranks"), degrees.replicas)

    stages, parts = [_of_stage(spec, degrees, stage, parts) for stage in range(degrees.pp)], _there(spec, parts)
    most = max((share(tensors) for tensors in stages), key=lambda f: f.value)
    return part(f"share of the {' and '.join(parts)} parameters", most)


def _there(spec: ModelSpec, parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts that a model has."""
    return tuple(p for p in parts if p == "language" or spec.vision)


def _of_stage(spec: ModelSpec, degrees: Degrees, stage: int, parts: Iterable[Part]) -> list[Tensor]:
    """Tensors of one pipeline stage; a tied embedding lies on the last one too."""
    return [t for t in spec.tensors() if t.part in parts and stage in stages_of(spec, t, degrees)]


def counted(spec: ModelSpec, degrees: Degrees, tensors: Iterable[Tensor]) -> Formula:
    """A rank's elements of these tensors: those that occur as often together, `64 x (5120 x 5120 / 8 q + ..)`."""
    shapes: dict[tuple[str, tuple[int, ...], int], int] = {}
    for t in tensors:
        key = ("" if t.part == "vision" else t.kind, _rows(spec, t), _ways(spec, degrees, t))
        shapes[key] = shapes.get(key, 0) + 1
    by_count: dict[int, Formula] = {}
    for (kind, shape, ways), count in shapes.items():
        one = _shape(shape, ways, kind)
        by_count[count] = by_count[count] + one if count in by_count else one
    total = n(0)
    for count, sizes in by_count.items():
        total = total + (n(count) * sizes if count > 1 else sizes)
    return total


def _rows(spec: ModelSpec, t: Tensor) -> tuple[int, ...]:
    return (spec.padded_vocab(), *t.shape[1:]) if t.kind in ("embed", "head") else t.shape


def _ways(spec: ModelSpec, degrees: Degrees, t: Tensor) -> int:
    """Ranks that a tensor is cut over; KV heads are repeated where there are more ranks than heads."""
    heads = min(degrees.tp, spec.kv_heads) if t.kind in ("k", "v", "k_bias", "v_bias") else degrees.tp
    return (heads if t.axis is not None else 1) * (degrees.ep if t.kind in EXPERTS else 1)


def _shape(shape: tuple[int, ...], ways: int, kind: str) -> Formula:
    product = n(shape[0], "" if len(shape) > 1 else kind)
    for i, size in enumerate(shape[1:], 2):
        product = product * n(size, kind if i == len(shape) else "")
    return product // ways
