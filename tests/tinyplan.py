"""A small correct plan by hand, the executable picture of what a plan means: 2 prompt groups, 3 chunks, q = 2.

         P1 prefix-reference | P1 prefix-actor | P1 decode || P2 score-reference | P2 train-actor || P3 update | publish
 control load  prompts!                          rollout?  || host score  score!                  ||
 train   prompts?                                          ||                      score?         ||
         fetch reference       prefix actor 0,1  rollout?  || fetch reference      map gradients  || chunk 0   | gather
         prefix reference 0,1  (saved state                || suffix reference 0,1 train 0 back 0 || chunk 1   | rebuild
         unmap reference        streams to                 || unmap reference      train 1 back 1 || chunk 2   | publish
                                the host)                  ||                      norm, offload  ||
 rollout prompts?  map kv  generate ..           rollout!  || unmap kv  freed!                    ||
                                                   rollout-complete                        theta-quiet        published
 HBM     snapshot 336, case3 36 ================================================================ rewritten == rebuilt
         kv 1152 ========================================= freed
         reference 174 ===== freed                         || reference 174 ===== freed
         boundary of the reference 16 =================================== freed
                               boundary of the actor 16 =========================== freed
                                                                                activations 3938, gradients 348
                                                                                                  || workspace 1648

`x!` is a signal, `x?` a wait, `||` a barrier of all three. The trainer also waits for `freed` behind rollout-complete:
only then are the pages of the KV cache gone. Two more plans do the same work in other ways:

 serial    the prefixes stand behind rollout-complete; the actor recomputes its saved state instead of keeping it
 apart     as serial, with one switch of the paper's section 3 after the other turned off: the rollout engine has a copy
           of the weights, Adam state comes to HBM as a whole; two data-parallel ranks reduce their gradients
 partial   as rollplex, with four groups sampled and prefixed of which a step takes two; the others go on in the next
 pools     as apart, with the rollout engine on GPUs of its own: what it holds is not added to what the trainer holds
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tinygraph import graph, loss
from tinyjob import tiny_job
from tinysummary import WINDOWS, Variant, summary

from rollplex.ir.plan import Infeasible, ObjectBytes, Plan, ProcessKind
from rollplex.ir.steps import (
    Barrier,
    Exchange,
    Fetch,
    Map,
    Offload,
    Publish,
    Rebuild,
    Run,
    Signal,
    Step,
    Unmap,
    UpdateChunk,
    Wait,
)

GROUPS = (0, 1)
CHUNKS = ((0, 32), (32, 64), (64, 87))


@dataclass(frozen=True)
class Hand:
    """Writes the programs of one variant; `w` are the names of its windows."""

    variant: Variant

    @property
    def w(self) -> dict[str, str]:
        return WINDOWS[self.variant]

    @property
    def first(self) -> str:
        return next(iter(self.w.values()))

    @property
    def apart(self) -> bool:
        return self.variant in ("apart", "pools")

    @property
    def saved(self) -> tuple[str, ...]:
        return ("actor.prefix_saved",) if self.overlapped else ()

    @property
    def overlapped(self) -> bool:
        return self.variant in ("rollplex", "partial")

    @property
    def sampled(self) -> tuple[int, ...]:
        return (*GROUPS, 2, 3) if self.variant == "partial" else GROUPS

    # ---- the trainer's tasks

    def prefix(self, role: str, m: int) -> Run:
        return Run(
            window=self.w[role], task="prefix", node=f"kv_{role}", role=role, microbatch=m,
            reads=("actor.snapshot" if role == "actor" else "reference.weights",), writes=(f"{role}.boundary",),
            streams=self.saved if role == "actor" else (), inputs=("prompts",),
        )  # fmt: skip

    def suffix(self, m: int) -> Run:
        return Run(
            window=self.w["score"], task="suffix", node="ref_logp", role="reference", microbatch=m,
            reads=("reference.weights", "reference.boundary"), writes=("reference.workspace",),
            inputs=("prompts", "rollout"), outputs=("ref_logp",),
        )  # fmt: skip

    def forward_backward(self, m: int) -> tuple[Step, Step]:
        reads, writes = ("actor.snapshot", "actor.boundary"), ("train.activations", "actor.gradients")
        return Run(
            window=self.w["train"], task="train", node="logp", role="actor", microbatch=m, reads=reads, writes=writes,
            inputs=("prompts", "rollout", "ref_logp", "score"),
        ), Run(
            window=self.w["train"], task="prefix_backward", node="kv_actor", role="actor", microbatch=m, reads=reads,
            writes=writes, streams=self.saved, inputs=("prompts",),
        )  # fmt: skip

    def chunk(self, i: int) -> UpdateChunk:
        start, stop = CHUNKS[i]
        adam = ("actor.master", "actor.moments")
        state, scratch = ("actor.gradients", *adam), adam if self.apart else ("optimizer.workspace",)
        return UpdateChunk(
            window=self.w["update"], role="actor", index=i, start=start, stop=stop,
            reads=state if self.apart else (), streams=() if self.apart else state, writes=("actor.snapshot", *scratch),
        )  # fmt: skip

    # ---- the trainer's windows

    def reference(self) -> list[Step]:
        w = self.w["reference"]
        return [
            Fetch(window=w, object="reference.weights"),
            Map(window=w, object="reference.boundary"),
            *(self.prefix("reference", m) for m in self.sampled),
            *([Unmap(window=w, object="reference.weights")] if self.overlapped else []),
        ]

    def actor(self) -> list[Step]:
        return [Map(window=self.w["actor"], object="actor.boundary"), *(self.prefix("actor", m) for m in self.sampled)]

    def decode(self) -> list[Step]:
        w = self.w["decode"]
        return [
            Wait(window=w, event="rollout"),
            Barrier(window=w, name="rollout-complete"),
            Wait(window=w, event="freed"),
        ]

    def score(self) -> list[Step]:
        w = self.w["score"]
        return [
            *([Fetch(window=w, object="reference.weights")] if self.overlapped else []),
            Map(window=w, object="reference.workspace"),
            *(self.suffix(m) for m in GROUPS),
            *(Unmap(window=w, object=f"reference.{o}") for o in ("weights", "boundary", "workspace")),
        ]

    def train(self) -> list[Step]:
        w, gradients = self.w["train"], "actor.gradients"
        reduce = Exchange(window=w, group="dp", op="all_reduce", object=gradients, nbytes=348)
        return [
            Wait(window=w, event="score"),
            Map(window=w, object="train.activations"),
            Map(window=w, object=gradients),
            *(step for m in GROUPS for step in self.forward_backward(m)),
            *([reduce] if self.apart else []),
            Run(
                window=w,
                task="grad_norm",
                node="update_actor",
                role="actor",
                reads=(gradients,),
                inputs=("rollout",),
                outputs=("norm",),
            ),
            Unmap(window=w, object="actor.boundary"),
            Unmap(window=w, object="train.activations"),
            *([] if self.apart else [Offload(window=w, object=gradients)]),
            Barrier(window=w, name="theta-quiet"),
        ]

    def update(self) -> list[Step]:
        w, adam, workspace = self.w["update"], ("actor.master", "actor.moments"), "optimizer.workspace"
        enter: list[Step] = [Map(window=w, object=workspace)]
        leave: list[Step] = [Unmap(window=w, object=workspace)]
        if self.apart:
            enter = [Fetch(window=w, object=o) for o in adam]
            leave = [*(Offload(window=w, object=o) for o in adam), Unmap(window=w, object="actor.gradients")]
        return [*enter, *(self.chunk(i) for i in range(len(CHUNKS))), *leave]

    def publish(self) -> list[Step]:
        w, snapshot = self.w["publish"], "actor.snapshot"
        shared = [
            Exchange(window=w, group="q", op="write", object=snapshot, nbytes=162),
            Rebuild(window=w, object="actor.case3", reads=(snapshot,)),
        ]
        return [
            *([self.refresh(snapshot)] if self.apart else shared),
            Publish(window=w, object=snapshot),
            Barrier(window=w, name="published"),
        ]

    def refresh(self, name: str) -> Exchange:
        """Both engines enter it: the rollout engine's copy is filled from the trainer's."""
        return Exchange(window=self.w["publish"], group="refresh", op="all_gather", object=name, nbytes=336)

    # ---- programs

    def trainer(self) -> list[Step]:
        windows = (step for window in self.w for step in getattr(self, window)())
        return [Wait(window=self.first, event="prompts"), *windows]

    def rollout(self) -> list[Step]:
        first, decode, weights = self.first, self.w["decode"], ("actor.snapshot", "actor.case3")
        return [
            Wait(window=first, event="prompts"),
            Map(window=first, object="rollout.kv"),
            Run(
                window=first, task="generate", node="rollout", role="actor", writes=("rollout.kv",),
                reads=("rollout.weights",) if self.apart else weights, inputs=("prompts",), outputs=("rollout",),
                streams=("rollout.carried",) if self.variant == "partial" else (),
            ),
            Signal(window=decode, event="rollout", carries=("rollout",)),
            Barrier(window=decode, name="rollout-complete"),
            Unmap(window=decode, object="rollout.kv"),
            Signal(window=decode, event="freed"),
            Barrier(window=self.w["train"], name="theta-quiet"),
            *([self.refresh("rollout.weights")] if self.apart else []),
            Barrier(window=self.w["publish"], name="published"),
        ]  # fmt: skip

    def controller(self) -> list[Step]:
        decode, train = self.w["decode"], self.w["train"]
        return [
            Run(window=self.first, task="load", node="prompts", outputs=("prompts",)),
            Signal(window=self.first, event="prompts", carries=("prompts",)),
            Wait(window=decode, event="rollout"),
            Barrier(window=decode, name="rollout-complete"),
            Run(window=train, task="host", node="score", inputs=("prompts", "rollout"), outputs=("score",)),
            Signal(window=train, event="score", carries=("score",)),
            Barrier(window=train, name="theta-quiet"),
            Barrier(window=self.w["publish"], name="published"),
        ]


@cache
def tiny_plan(variant: Variant = "rollplex") -> Plan:
    """One of the plans of the docstring; it fits to the byte."""
    hand = Hand(variant)
    copies = 2 if hand.apart else 1
    home = ("training", "rollout") if variant == "pools" else ("gpus", "gpus")
    held = summary(variant)
    schedule = "disaggregated" if variant == "pools" else "rollplex" if hand.overlapped else "serial"
    gpus, apart = (8, 4) if variant == "pools" else (2 * copies, None)
    reasons = ["tiny on host: Qwen2.5-VL alone runs there", "tensor_parallel 2: the host backend trains whole models"]
    reasons += [f"schedule {schedule}"] if apart else []
    return Plan(
        feasible=True,
        schedule=schedule,
        algorithm="grpo.py:grpo",
        job=tiny_job(schedule, gpus, apart, held, 0.5 if variant == "partial" else None),
        graph=graph(WINDOWS[variant]),
        losses={"actor": loss()},
        hosts={"score": "reward"},
        not_executable=tuple(reasons),
        summary=held,
        processes={
            "controller": ProcessKind(engine="controller", ranks=1),
            "train": ProcessKind(
                engine="host", pool=home[0], ranks=2 * copies, tensor_parallel=2, data_parallel=copies
            ),
            "rollout": ProcessKind(
                engine="host", pool=home[1], ranks=2 * copies, tensor_parallel=1, data_parallel=2 * copies
            ),
        },
        programs={
            "controller": tuple(hand.controller()),
            "train": tuple(hand.trainer()),
            "rollout": tuple(hand.rollout()),
        },
    )


def too_large(variant: Variant = "rollplex", lacks: int = 10) -> Plan:
    """The same plan on a GPU with fewer bytes: infeasible, and correct in everything else."""
    plan = tiny_plan(variant)
    capacity = plan.summary.peak_hbm_bytes - lacks
    first = next(w for w in plan.summary.windows if w.hbm_bytes > capacity)
    live = sorted(first.by_object.items(), key=lambda item: (-item[1], item[0]))
    why = Infeasible(
        window=first.name,
        shortfall_bytes=first.hbm_bytes - capacity,
        objects=tuple(ObjectBytes(name=n, bytes=b) for n, b in live),
        remedies=(),
    )
    return with_capacity(plan, capacity).model_copy(update={"feasible": False, "infeasible": why})


def with_capacity(plan: Plan, capacity: int) -> Plan:
    """The same plan on GPUs of another size."""
    cluster = {**plan.job["cluster"], "capacity_gib": capacity / 2**30}
    summary = plan.summary.model_copy(update={"capacity_bytes": capacity})
    return plan.model_copy(update={"job": {**plan.job, "cluster": cluster}, "summary": summary})
