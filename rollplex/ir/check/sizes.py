"""Bytes of every object, counted again from the plan's job: what a GPU holds follows from the model and the work.

    actor.snapshot    parameters of a rank x 2           actor.boundary     prompts x tokens x KV bytes of a token
    actor.master      updated parameters x 4             optimizer.workspace    chunks in flight x 16 B a parameter
    rollout.kv        as the job states it               train.activations  what the engine says of its work

Parameters are summed over the tensors of the model, the rest is written out here, from no pass. What an engine says of
its temporaries (activations, workspaces, saved state) is asked of the engine again: that is consistent, not proven.
Objects of other names, which a package may add, are taken as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rollplex.ir.check.facts import Facts
from rollplex.ir.check.rules import Violation
from rollplex.ir.check.update import state_itemsize
from rollplex.ir.engines import engine
from rollplex.ir.hardware import CONTEXT_MIB, communication_mib
from rollplex.ir.job import Job
from rollplex.ir.lora import served_bytes, trained_parts, trained_spec
from rollplex.ir.plan import StateClass
from rollplex.ir.planned_layout import LayoutClass
from rollplex.ir.shards import owned_parameters, rank_parameters, stage_layers
from rollplex.ir.sizes import gib_to_nbytes
from rollplex.ir.spec import Part
from rollplex.ir.steps import Exchange, UpdateChunk
from rollplex.ir.work import Work, one_response, role_work, turn_work, whole_call

MIB = 2**20
CARRIED_TOKEN_BYTES = 4 + 4 + 4
"""Id, log-probability and snapshot of a token of an unfinished response."""
ADAM_TEMPORARIES, FOREACH_TEMPORARIES = 2, 1
"""Elements that torch's Adam allocates for each that it updates; over all parameters at once."""


@dataclass(frozen=True)
class Sizes:
    """The bytes that a job gives objects, before they are rounded up to pages."""

    facts: Facts
    job: Job

    def of(self, name: str) -> int | None:
        """Bytes of the object of this name; None where the name says nothing."""
        if name in OF_PROCESSES:
            return OF_PROCESSES[name](self)
        piece, _, number = name.rpartition(".")
        piece, turn = (piece, int(number)) if number.isdigit() else (name, 1)
        role, _, part = piece.rpartition(".")
        if role not in self.job.roles or turn > self.job.workload.turn_count:
            return None
        if part in OF_TURNS:
            return OF_TURNS[part](self, role, turn)
        return OF_ROLES[part](self, role) if part in OF_ROLES and turn == 1 else None

    # ---- processes and the rollout engine

    @cached_property
    def shared(self) -> bool:
        """Whether both engines read one copy of the policy's weights."""
        return self.job.shares_weights and self.job.schedule != "naive" and "weight_sharing" not in self.job.ablate

    def context(self, process: str) -> int:
        """A CUDA context, and NCCL's buffers for every group of GPUs that the process is in."""
        cluster, groups = self.job.cluster, len({ranks for ranks in self.groups(process) if len(ranks) > 1})
        buffers = 0
        if process == "rollout" and self.job.rollout_tp > 1:
            more, buffers = self.engines_own()
            groups += more
        context = CONTEXT_MIB * MIB if cluster.context_gib is None else gib_to_nbytes(cluster.context_gib)
        nccl = communication_mib(groups) * MIB if cluster.nccl_gib is None else gib_to_nbytes(cluster.nccl_gib)
        return 0 if self.job.on_host else context + (nccl if groups else 0) + buffers

    def engines_own(self) -> tuple[int, int]:
        """Communicators that a rollout engine has beyond one over its ranks, and bytes of its own all-reduces."""
        rollout = self.job.roles[self.job.policy].rollout
        facts = engine(rollout.engine) if rollout else None
        named = getattr(facts, "communicators", None)
        own = 0 if self.job.cluster.nccl_gib is not None else getattr(facts, "all_reduce_bytes", 0)
        return len(named(self.job.spec)) - 1 if named else 0, own

    def groups(self, process: str) -> Iterator[frozenset[int]]:
        """Groups of GPUs that NCCL sends in, by the ranks of the first of each; one of the same ranks is the same."""
        job = self.job
        yield frozenset(range(job.gpus if job.disaggregated else 1))
        if process == "rollout":
            yield frozenset(range(job.rollout_tp))
            return
        for d in map(job.degrees, job.roles):
            column = d.tp * d.replicas  # ranks of a stage
            yield from (frozenset(range(d.tp)), frozenset(range(0, d.pp * column, column)))
            yield from (frozenset(range(0, n * d.tp, d.tp)) for n in (d.cp, d.ep))
        for d in map(job.degrees, job.trained):
            yield frozenset(range(0, d.replicas * d.tp, d.tp))
        sent = self.shared and job.policy not in self.adapted and job.cluster.nodes > 1
        classes = self.facts.plan.summary.layout.classes if sent else ()
        yield from (self.slabs(c.group) for c in classes if self._from_other_nodes(c))

    def _from_other_nodes(self, c: LayoutClass) -> bool:
        """Whether GPUs of several nodes have a class together: within a node they write into each other's pages."""
        d, gpus = self.job.degrees(self.job.policy), self.job.gpus
        ways = d.ep if c.name.startswith("expert_") else 1
        width, nodes = max(1, c.group // (d.pp * ways)), dict[tuple[int, int], set[int]]()
        for gpu in range(gpus):  # stages lie furthest apart, tensor-parallel ranks are neighbours
            copy, tensor = divmod(gpu % (gpus // d.pp), d.tp)
            nodes.setdefault((copy // ways, tensor // width), set()).add(gpu // self.job.cluster.gpus_per_node)
        return c.group > 1 and any(len(of_group) > 1 for of_group in nodes.values())

    def slabs(self, size: int) -> frozenset[int]:
        """Ranks whose slabs make up one shard: q of each stage, for experts those of every expert-parallel rank."""
        d, q = self.job.degrees(self.job.policy), self.job.q
        places = itertools.product(range(d.pp), range(size // (q * d.pp)), range(q))
        return frozenset((stage * d.replicas + copy) * d.tp + at for stage, copy, at in places)

    def rollout_weights(self) -> int:
        """The language model on a rollout rank."""
        return self.job.spec.rank_parameters(self.job.rollout_tp, "language") * self.job.itemsize

    def rollout_tower(self) -> int:
        """The vision tower on a rollout rank: whole, or cut over the engine's ranks."""
        rollout = self.job.roles[self.job.policy].rollout
        cut = rollout is not None and rollout.mm_encoder_tp_mode == "weights"
        return -(-self.job.spec.vision_parameters // (self.job.rollout_tp if cut else 1)) * self.job.itemsize

    def carried(self) -> int:
        """Unfinished responses at their budget: an engine may finish none of its own."""
        job = self.job
        groups = min(-(-job.sampled // job.engines), job.sampled - job.workload.prompts)
        return groups * job.group * job.workload.response_tokens * CARRIED_TOKEN_BYTES

    # ---- weights

    def weights(self, role: str, part: Part) -> int:
        """Weights of a part on a rank."""
        held = rank_parameters(self.job.spec_of(role), self.job.degrees(role), part)
        return self._kept(role, held, self.job.roles[role].train is not None and role not in self.adapted)

    def _kept(self, role: str, held: int, masters: bool) -> int:
        """Under ZeRO-3 a share, in FP32 where they are the masters."""
        if self.job.zero(role) < 3:
            return held * self.job.itemsize
        itemsize = state_itemsize(self.facts) if masters else self.job.itemsize
        return -(-held // self.job.degrees(role).replicas) * itemsize

    @cached_property
    def adapted(self) -> frozenset[str]:
        """Roles whose adapters are trained, and nothing else."""
        return frozenset(name for name, role in self.job.roles.items() if role.lora is not None)

    def base(self, role: str) -> int:
        """The language model: of the rollout engine's shard where it reads the same pages."""
        return self.rollout_weights() if role == self.job.policy and self.shared else self.weights(role, "language")

    def snapshot(self, role: str) -> int:
        """What P3 rewrites: the weights, or the adapters beside them."""
        return self._kept(role, self.trained(role), True) if role in self.adapted else self.base(role)

    # ---- prefixes

    def prompts(self, role: str) -> int:
        """Prefixes of a rank: a slot for each."""
        return self.facts.boundaries[role].slots if role in self.facts.boundaries else self.job.prefixes_of(role)

    def boundary(self, role: str, turn: int) -> int:
        """Keys and values of a prompt's tokens, or of what is new in its histories, in layers of the fullest stage."""
        spec, degrees, load = self.job.spec_of(role), self.job.degrees(role), self.job.workload
        tokens, sequences = (load.prompt_tokens, 1) if turn == 1 else (load.new_tokens, self.job.group)
        layers, pieces = max(stage_layers(spec.layers, degrees)), 2 * degrees.cp if degrees.cp > 1 else 1
        local = -(-tokens // pieces) * (2 if degrees.cp > 1 else 1)
        kv = 2 * spec.kv_heads_per_rank(degrees.tp) * spec.head_dim * self.job.itemsize
        return self.prompts(role) * sequences * local * layers * kv

    # ---- what an engine says of its work

    def _engine(self, role: str) -> Any:
        return engine(self.job.trainer(role).engine)

    def _steps(self, role: str) -> Iterator[Work]:
        """The work of a suffix step of every turn, or of a whole call where a role has no prefix."""
        whole = role not in self.facts.boundaries
        responses = max(1, self.facts.plan.summary.chunks.microbatch.suffix_responses)
        stated = self.job.trainer(role).microbatch
        if self.job.whole_sequences(role) and stated != "auto":
            responses = stated
        for turn in range(1, self.job.workload.turn_count + 1):
            work = one_response(turn_work(self.job, role, turn), responses)
            yield whole_call(work) if whole else replace(work, dropped=(role, turn) in self.made_again)

    @cached_property
    def made_again(self) -> frozenset[tuple[str, int]]:
        """Roles and turns whose prefix backward uses nothing that its prefix has saved."""
        backward = [(s, self.facts.saved_by(s)) for _, s in self.facts.runs("prefix_backward")]
        bare = [s for s, o in backward if o is None or o.name not in (*s.reads, *s.streams)]
        return frozenset((s.role, self.facts.turn.get(s.node, 1)) for s in bare)

    def saved(self, role: str, turn: int) -> int:
        """What a trained role's prefixes save for their backward."""
        return self.prompts(role) * self._engine(role).prefix_saved_bytes(turn_work(self.job, role, turn))

    def prefix_workspace(self, role: str, turn: int) -> int:
        """Temporaries of a prefix; one that runs with its group has those of the group's step, which come later."""
        return 0 if role in self.facts.with_group else self._prefix_room(role, turn)

    def _prefix_room(self, role: str, turn: int) -> int:
        return self._engine(role).prefix_workspace_bytes(turn_work(self.job, role, turn), role in self.facts.trained)

    def score_workspace(self, role: str) -> int:
        """Temporaries of scoring, and of the prompt where the call is not split."""
        scoring = max(self._engine(role).score_workspace_bytes(work) for work in self._steps(role))
        if role in self.facts.boundaries:
            return scoring
        return max(scoring, self._engine(role).prefix_workspace_bytes(role_work(self.job, role), False))

    def activations(self, role: str) -> int:
        """Of training; under `naive` all of one trajectory."""
        if self.job.schedule == "naive":
            load = self.job.workload
            every = replace(role_work(self.job, role), prompt_tokens=load.history_tokens(load.turn_count))
            return self._engine(role).full_activation_bytes(one_response(every))
        prefix = self._prefix_room(role, 1) if role in self.facts.with_group else 0
        return max(prefix, *(self._engine(role).train_activation_bytes(work) for work in self._steps(role)))

    # ---- the update

    def trained(self, role: str) -> int:
        """Parameters that a rank trains: the parts that are not frozen, or adapters."""
        return rank_parameters(trained_spec(self.job, role), self.job.degrees(role), *trained_parts(self.job, role))

    def updated(self, role: str) -> int:
        """Parameters that a rank updates: all that it trains, or its share of them."""
        if not self.job.cuts_optimizer(role):
            return self.trained(role)
        return owned_parameters(trained_spec(self.job, role), self.job.degrees(role), *trained_parts(self.job, role))

    def gradients(self, role: str) -> int:
        """Of what is trained, or from ZeRO-2 on of what is updated."""
        return (self.updated(role) if self.job.zero(role) > 1 else self.trained(role)) * state_itemsize(self.facts)

    def master(self, role: str) -> int:
        """Master weights; under ZeRO-3 the weights themselves are."""
        return 0 if self.job.zero(role) == 3 else self.updated(role) * state_itemsize(self.facts)

    def moments(self, role: str) -> int:
        """Two a parameter."""
        return 2 * self.updated(role) * state_itemsize(self.facts)

    def adam(self, role: str) -> int:
        """What Adam allocates over a resident state: a copy of the gradient too, where decay joins it."""
        return (
            (FOREACH_TEMPORARIES + self.job.optimizer.joins_gradient) * self.updated(role) * state_itemsize(self.facts)
        )

    def chunks(self, role: str) -> int:
        """Chunks in flight: gradient, master weight and moments of each, where any of them comes over the link.

        Beside them what Adam allocates for the one that it updates; on a GPU torch's fused kernel does without. A page
        then has the numbers of a step where nothing comes over the link.
        """
        chunks = [at.step for at in self.facts.steps() if isinstance(at.step, UpdateChunk) and at.step.role == role]
        streamed, overlaps = any(c.streams for c in chunks), self._engine(role).overlaps_update
        elements = self.facts.plan.summary.chunks.of(role).elements
        flying = min((self.job.optimizer.in_flight if overlaps else 1) * elements, self.updated(role))
        updating = 0 if overlaps and not self.job.on_host else elements
        states = (4 * flying if streamed else 0) + ADAM_TEMPORARIES * updating
        return states * state_itemsize(self.facts) or self.job.device.page_bytes


OF_PROCESSES: dict[str, Callable[[Sizes], int]] = {
    "train.context": lambda s: s.context("train"),
    "rollout.context": lambda s: s.context("rollout"),
    "rollout.kv": lambda s: s.job.kv_cache_bytes,
    "rollout.runtime": lambda s: s.job.runtime_bytes,
    "rollout.carried": Sizes.carried,
    "rollout.weights": Sizes.rollout_weights,
    "rollout.adapters": lambda s: served_bytes(s.job),
    "rollout.vision": Sizes.rollout_tower,
    "train.activations": lambda s: s.activations(s.job.policy),
    "optimizer.workspace": lambda s: s.chunks(s.job.policy),
}
OF_TURNS: dict[str, Callable[[Sizes, str, int], int]] = {
    "boundary": Sizes.boundary,
    "prefix_saved": Sizes.saved,
    "prefix_workspace": Sizes.prefix_workspace,
}
"""Of which every turn has a piece: actor.boundary, actor.boundary.2, .."""
OF_ROLES: dict[str, Callable[[Sizes, str], int]] = {
    "base": Sizes.base,
    "snapshot": Sizes.snapshot,
    "weights": lambda s, role: s.weights(role, "language"),
    "vision": lambda s, role: s.weights(role, "vision"),
    "case3": lambda s, _: s.facts.plan.summary.layout.case3_buffer_bytes,
    "score_workspace": Sizes.score_workspace,
    "activations": Sizes.activations,
    "gradients": Sizes.gradients,
    "master": Sizes.master,
    "moments": Sizes.moments,
    "adam": Sizes.adam,
    "optimizer_workspace": Sizes.chunks,
}


CLASSES: dict[StateClass, frozenset[str]] = {
    "permanent": frozenset({"context", "carried", "master", "moments"}),
    "regenerable": frozenset({"snapshot", "base", "weights", "vision", "case3", "adapters"}),
    "boundary": frozenset({"boundary"}),
}
"""What of these names an object is; anything else that is sized here is phase-local."""


def class_of(name: str) -> StateClass:
    """The class of an object that is sized here, by the last part of its name; the number of a turn is none."""
    part = [p for p in name.split(".") if not p.isdigit()][-1]
    for class_, named in CLASSES.items():
        if part in named:
            return class_
    return "phase-local"


def check_sizes(facts: Facts, job: Job) -> Iterator[Violation]:
    """Objects have the bytes of their job, and less than a page more (paper table 3)."""
    sizes, page = Sizes(facts, job), job.device.page_bytes
    for o in facts.objects.values():
        exact = sizes.of(o.name)
        if exact is not None and not 0 <= o.bytes - exact < page:
            what = f"{o.name} has {o.bytes:,} bytes, the job's model and work need {exact:,} in whole pages"
            yield Violation("size", what, object=o.name, nbytes=exact, where=o.name)
        if exact is not None and o.class_ != (right := class_of(o.name)):
            yield Violation("class", f"{o.name} is {o.class_}, it holds {right} state", object=o.name, where=o.name)
    yield from _gathered(facts, sizes)


def _gathered(facts: Facts, sizes: Sizes) -> Iterator[Violation]:
    """Where each replica updates a share, it receives the weights of all others' shares, and no more."""
    for at in facts.steps():
        step = at.step
        if not isinstance(step, Exchange) or (step.group, step.op) != ("dp", "all_gather"):
            continue
        role = facts.objects[step.object].role
        if role in sizes.job.trained:
            exact = (sizes.trained(role) - sizes.updated(role)) * sizes.job.itemsize
            if step.nbytes != exact:
                what = f"it moves {step.nbytes:,} bytes, the other replicas update {exact:,}"
                yield Violation("missing-exchange", what, at, step.object, exact)
