"""Lower the schedule to one program of steps for each kind of process: what the runtime executes, step by step.

    train        wait prompts | fetch reference.weights | run prefix reference 0 .. | unmap .. | barrier ..
    rollout      wait prompts | map rollout.kv | run generate | signal rollout | barrier .. | unmap ..
    controller   run load | signal prompts | wait rollout | barrier .. | run host reward | signal score ..

An object enters at the start of the window that needs it and leaves at the end of the last that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from rollplex.ir import graph as g
from rollplex.ir.module import Module
from rollplex.ir.plan import BARRIERS
from rollplex.ir.steps import (
    Barrier,
    Drop,
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
from rollplex.passes.chunk_sizes import Chunks
from rollplex.passes.layout import Layout
from rollplex.passes.residency import Residency
from rollplex.passes.schedule import Call, Schedule, Window
from rollplex.passes.state import START, Lifetimes, StateObject
from rollplex.passes.work import trained_parameters, trains_vision

ROLLOUT_COMPLETE, THETA_QUIET, PUBLISHED = BARRIERS
RELEASED = "rollout-released"


@dataclass(frozen=True)
class Programs:
    """The steps of every process kind."""

    made_by: ClassVar[str] = "lower"
    steps: dict[str, tuple[Step, ...]]

    def __str__(self) -> str:
        return "\n".join(f"{name:<12} {len(steps)} steps" for name, steps in self.steps.items())


@dataclass(frozen=True)
class Lowering:
    """One module on its way to steps; each method makes the steps of one thing."""

    module: Module

    @property
    def schedule(self) -> Schedule:
        """Windows and calls."""
        return self.module[Schedule]

    @property
    def policy(self) -> str:
        """The trained role."""
        return self.module.job.policy

    @property
    def last_window(self) -> dict[str, str]:
        """The last window of every phase."""
        return {w.phase: w.name for w in self.schedule.windows}

    @property
    def first(self) -> str:
        """The first window of the iteration."""
        return self.schedule.windows[0].name

    def place(self, name: str, window: str) -> str:
        """Where an object is in a window; `-` for one that this job does not have."""
        residency = self.module[Residency]
        return residency.place(name, window) if name in residency.places else "-"

    def placed(self, window: str, place: str, *names: str) -> tuple[str, ...]:
        """Those of the named objects that are at this place in the window."""
        return tuple(n for n in names if self.place(n, window) == place)

    def owned(self, process: str) -> list[StateObject]:
        """Objects whose pages a process kind owns."""
        return [o for o in self.module[Lifetimes].objects if o.process == process]

    # ---- residency changes

    def neighbours(self, o: StateObject, window: str) -> tuple[str, str]:
        """Places of an object in the window before and after; `-` where it does not exist."""
        names = self.schedule.names()
        alive = o.alive(names)
        cyclic = o.always or o.produced == START
        i = alive.index(window)
        before = alive[i - 1] if i or cyclic else None
        after = alive[(i + 1) % len(alive)] if i + 1 < len(alive) or cyclic else None
        return (self.place(o.name, before) if before else "-", self.place(o.name, after) if after else "-")

    def enter(self, process: str, window: str) -> Iterator[Step]:
        """Maps and fetches at a window's start."""
        for o in self.owned(process):
            if self.place(o.name, window) != "hbm":
                continue
            before, _ = self.neighbours(o, window)
            if before == "host":
                yield Fetch(window=window, object=o.name)
            elif before in ("-", "dropped"):
                yield Map(window=window, object=o.name)

    def leave(self, process: str, window: str) -> Iterator[Step]:
        """Unmaps, offloads and drops at a window's end."""
        for o in self.owned(process):
            if self.place(o.name, window) != "hbm":
                continue
            _, after = self.neighbours(o, window)
            if after == "-" or (after == "host" and o.host_backed):
                yield Unmap(window=window, object=o.name)
            elif after == "host":
                yield Offload(window=window, object=o.name)
            elif after == "dropped":
                yield Drop(window=window, object=o.name)

    # ---- trainer

    def train(self) -> Iterator[Step]:
        """The training-rank program."""
        for window in self.schedule.windows:
            yield from self._waits(window)
            yield from self.enter("train", window.name)
            yield from self._work(window)
            yield from self.leave("train", window.name)
            yield from self._window_end(window)

    def _waits(self, window: Window) -> Iterator[Step]:
        if window.name == self.first:
            yield Wait(window=window.name, event=self._prompts)
        if window.kind == "train":
            yield from (Wait(window=window.name, event=host) for host in self.schedule.hosts)

    @property
    def _prompts(self) -> str:
        return next(n.name for n in self.module.graph.nodes if n.op == "placeholder")

    def _window_end(self, window: Window) -> Iterator[Step]:
        name = window.name
        if name == self.last_window["P1"]:
            yield Wait(window=name, event=self.schedule.generate.node)
            yield Barrier(window=name, name=ROLLOUT_COMPLETE)
            if self._released(name):
                yield Wait(window=name, event=RELEASED)
        if name == self.last_window["P2"]:
            yield Barrier(window=name, name=THETA_QUIET)
        if name == self.last_window["P3"]:
            yield Barrier(window=name, name=PUBLISHED)

    def _released(self, window: str) -> list[Step]:
        return list(self.leave("rollout", window))

    def _work(self, window: Window) -> Iterator[Step]:
        match window.kind:
            case "prefix":
                yield from (self._prefix(window, m) for m in range(self.module.job.prompts_per_rank))
            case "score":
                yield from (self._suffix(window, m) for m in range(self.module.job.prompts_per_rank))
            case "train":
                yield from self._train_window(window)
            case "update":
                yield from self._update(window)
            case "publish":
                yield from self._publish(window)
            case "decode":
                return

    def _weights(self, window: Window) -> tuple[str, ...]:
        """Weights that a role's model reads in a window; a frozen tower may be the policy's own."""
        frozen = window.role != self.policy
        own = (f"{window.role}.weights",) if frozen else (f"{window.role}.snapshot",)
        tower = (
            f"{window.role}.vision" if f"{window.role}.vision" in self.module[Lifetimes] else f"{self.policy}.vision"
        )
        if window.kind == "prefix" or (window.kind == "train" and trains_vision(self.module.job, window.role)):
            own = (*own, tower)
        return self.placed(window.name, "hbm", *own)

    def _prefix(self, window: Window, microbatch: int) -> Step:
        call, role, at = self._call(window), window.role, window.name
        saved = (f"{role}.prefix_saved",) if call.trained else ()
        return Run(
            window=at, task="prefix", node=call.node, role=role, microbatch=microbatch,
            reads=self._weights(window),
            writes=self.placed(at, "hbm", f"{role}.boundary", f"{role}.prefix_workspace", *saved),
            streams=self.placed(at, "host", *saved),
            inputs=(self._prompts,),
        )  # fmt: skip

    def _call(self, window: Window) -> Call:
        return next(c for c in self.schedule.calls if c.node == window.node)

    def _suffix(self, window: Window, microbatch: int) -> Step:
        role, at = window.role, window.name
        return Run(
            window=at, task="suffix", node=window.node, role=role, microbatch=microbatch,
            reads=(*self._weights(window), *self.placed(at, "hbm", f"{role}.boundary")),
            writes=self.placed(at, "hbm", f"{role}.score_workspace"),
            inputs=(self._prompts, self.schedule.generate.node), outputs=(window.node,),
        )  # fmt: skip

    def _train_window(self, window: Window) -> Iterator[Step]:
        job, at, role = self.module.job, window.name, window.role
        for m in range(job.prompts_per_rank):
            yield self._train_step(window, m)
            yield self._prefix_backward(window, m)
        gradients = f"{role}.gradients"
        if job.data_parallel(role) > 1:
            nbytes = self.module[Lifetimes][gradients].nbytes
            yield Exchange(window=at, group="dp", op="all_reduce", object=gradients, nbytes=nbytes)
        yield Run(window=at, task="grad_norm", node=self._update_node, role=role, reads=(gradients,), outputs=("norm",))

    @property
    def _update_node(self) -> str:
        return next(c.node for c in self.schedule.calls if c.op == "update")

    def _train_step(self, window: Window, microbatch: int) -> Step:
        role, at = window.role, window.name
        scores = tuple(w.node for w in self.schedule.windows if w.kind == "score")
        return Run(
            window=at, task="train", node=window.node, role=role, microbatch=microbatch,
            reads=(*self._weights(window), *self.placed(at, "hbm", f"{role}.boundary")),
            writes=self.placed(at, "hbm", f"{role}.gradients", "train.activations"),
            inputs=(self._prompts, self.schedule.generate.node, *scores, *self.schedule.hosts),
        )  # fmt: skip

    def _prefix_backward(self, window: Window, microbatch: int) -> Step:
        role, at = window.role, window.name
        saved = f"{role}.prefix_saved"
        prefix = next(c for c in self.schedule.calls if c.op == "prefix" and c.role == role)
        return Run(
            window=at, task="prefix_backward", node=prefix.node, role=role, microbatch=microbatch,
            reads=(*self._weights(window), *self.placed(at, "hbm", f"{role}.boundary", saved)),
            writes=self.placed(at, "hbm", f"{role}.gradients", "train.activations"),
            streams=self.placed(at, "host", saved), inputs=(self._prompts,),
        )  # fmt: skip

    def _update(self, window: Window) -> Iterator[Step]:
        job, role, at = self.module.job, window.role, window.name
        chunks = self.module[Chunks].summary.optimizer
        total = trained_parameters(job, role)
        state = (f"{role}.gradients", f"{role}.master", f"{role}.moments")
        tower = (f"{role}.vision",) if trains_vision(job, role) else ()
        for index in range(chunks.count):
            start = index * chunks.elements
            yield UpdateChunk(
                window=at, role=role, index=index, start=start, stop=min(start + chunks.elements, total),
                reads=self.placed(at, "hbm", *state),
                writes=self.placed(at, "hbm", f"{role}.snapshot", *tower, "optimizer.workspace"),
                streams=self.placed(at, "host", *state),
            )  # fmt: skip

    def _publish(self, window: Window) -> Iterator[Step]:
        at, snapshot = window.name, f"{window.role}.snapshot"
        layout = self.module[Layout].summary
        if "rollout.weights" in self.module[Lifetimes]:
            nbytes = self.module[Lifetimes]["rollout.weights"].nbytes
            yield Exchange(window=at, group="refresh", op="all_gather", object=snapshot, nbytes=nbytes)
        elif layout.q > 1:
            nbytes = layout.exchange_bytes_per_gpu
            yield Exchange(window=at, group="q", op="all_gather", object=snapshot, nbytes=nbytes)
        if buffer := self.placed(at, "hbm", f"{window.role}.case3"):
            yield Rebuild(window=at, object=buffer[0], reads=(snapshot,))
        yield Publish(window=at, object=snapshot)

    # ---- rollout engine

    def rollout(self) -> Iterator[Step]:
        """The rollout-rank program."""
        first, end, call = self.schedule.decode_windows[0], self.last_window["P1"], self.schedule.generate
        yield Wait(window=first, event=self._prompts)
        yield from self.enter("rollout", first)
        weights = (f"{self.policy}.snapshot", f"{self.policy}.case3", f"{self.policy}.vision")
        if "rollout.weights" in self.module[Lifetimes]:
            weights = ("rollout.weights", "rollout.vision")
        yield Run(
            window=first, task="generate", node=call.node, role=call.role, reads=self.placed(first, "hbm", *weights),
            writes=self.placed(first, "hbm", "rollout.kv", "rollout.runtime"),
            inputs=(self._prompts,), outputs=(call.node,),
        )  # fmt: skip
        yield Signal(window=end, event=call.node, carries=(call.node,))
        yield Barrier(window=end, name=ROLLOUT_COMPLETE)
        if released := self._released(end):
            yield from released
            yield Signal(window=end, event=RELEASED)
        yield Barrier(window=self.last_window["P2"], name=THETA_QUIET)
        if "rollout.weights" in self.module[Lifetimes]:
            nbytes = self.module[Lifetimes]["rollout.weights"].nbytes
            at = self.last_window["P3"]
            yield Exchange(window=at, group="refresh", op="all_gather", object="rollout.weights", nbytes=nbytes)
        yield Barrier(window=self.last_window["P3"], name=PUBLISHED)

    # ---- controller

    def controller(self) -> Iterator[Step]:
        """The controller's program: data in, host functions, barriers."""
        first, end = self.first, self.last_window["P1"]
        yield Run(window=first, task="load", node=self._prompts, outputs=(self._prompts,))
        yield Signal(window=first, event=self._prompts, carries=(self._prompts,))
        yield Wait(window=end, event=self.schedule.generate.node)
        yield Barrier(window=end, name=ROLLOUT_COMPLETE)
        at = self.last_window["P2"]
        for host in self.schedule.hosts:
            yield Run(window=at, task="host", node=host, inputs=self._host_inputs(host), outputs=(host,))
            yield Signal(window=at, event=host, carries=(host,))
        yield Barrier(window=at, name=THETA_QUIET)
        yield Barrier(window=self.last_window["P3"], name=PUBLISHED)

    def _host_inputs(self, host: str) -> tuple[str, ...]:
        """Values a host function's arguments are made of: prompts, the rollout, other host results."""
        sources = {self._prompts, self.schedule.generate.node, *self.schedule.hosts}
        found: list[str] = []

        def walk(node: fx.Node) -> None:
            for i in node.all_input_nodes:
                if i.name not in sources:
                    walk(i)
                elif i.name not in found:
                    found.append(i.name)

        walk(g.node_named(self.module.graph, host))
        return tuple(found)


@dataclass(frozen=True)
class LowerPass:
    """Write one program of steps for each kind of process."""

    name: ClassVar[str] = "lower"
    makes: ClassVar[type] = Programs

    def run(self, module: Module) -> Module:
        """Lower; the result is for the checker to judge."""
        lowering = Lowering(module)
        steps = {
            "controller": tuple(lowering.controller()),
            "train": tuple(lowering.train()),
            "rollout": tuple(lowering.rollout()),
        }
        return module.put(Programs(steps))
