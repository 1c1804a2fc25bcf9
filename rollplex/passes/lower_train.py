"""The training rank's program: window after window, prefixes, scoring, training, then the streamed update.

wait prompts | fetch reference.weights | run prefix reference 0 .. | unmap .. | barrier rollout-complete | ..
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from rollplex.ir.lora import lora_of
from rollplex.ir.loss import split_loss
from rollplex.ir.steps import Barrier, Exchange, Piece, Publish, Rebuild, Run, Signal, Step, UpdateChunk, Wait
from rollplex.ir.work import trains_vision
from rollplex.passes.chunk_sizes import Chunks
from rollplex.passes.inventory import activations_name
from rollplex.passes.layout import Layout
from rollplex.passes.leaving import leaving
from rollplex.passes.lower_release import ReleasedSnapshot
from rollplex.passes.lowering import PUBLISHED, RELEASED, ROLLOUT_COMPLETE, THETA_QUIET, WAKE
from rollplex.passes.schedule import Call, Window, turned
from rollplex.passes.state import Lifetimes
from rollplex.passes.update_sizes import workspace_name
from rollplex.passes.work import lacking_parameters, updated_parameters


@dataclass(frozen=True)
class TrainProgram(ReleasedSnapshot):
    """Makes the steps of a training rank."""

    def steps(self) -> Iterator[Step]:
        """The training-rank program."""
        for window in self.schedule.windows:
            yield from self._waits(window)
            yield from self.enter("train", window.name)
            yield from self._work(window)
            yield from self.leave("train", window.name)
            yield from self._window_end(window)

    def _waits(self, window: Window) -> Iterator[Step]:
        if window.name == self.updating and self.calls_rollout:
            yield Signal(window=window.name, event=WAKE)
        if window.name == self.first:
            yield Wait(window=window.name, event=self.prompts)
        if self.schedule.stream is None:
            yield from (Wait(window=window.name, event=h) for h in self.schedule.hosts if self.waited[h] == window.name)
            return
        early = (h for h in self.schedule.hosts if h in self.schedule.early and self.waited[h] == window.name)
        yield from (Wait(window=window.name, event=host) for host in early)
        if window in self.schedule.streaming:
            yield from self._parts(window, window.name, self.streamed_groups[-1])

    def _parts(self, window: Window, at: str, group: int) -> Iterator[Step]:
        """Waits for what a window's work takes of a group, and no work before it has taken."""
        before = self.schedule.streaming[: self.schedule.streaming.index(window)]
        known = {v for w in before for v in self._inputs(w)}
        if group == self.streamed_groups[-1]:
            known.update(c.node for c in self.schedule.generates)  # its end ends the stream
        for name in (v for v in self._inputs(window) if v not in known):
            (event,) = self.of_group((name,), group)
            if event != name:
                yield Wait(window=at, event=event)

    @property
    def waited(self) -> dict[str, str]:
        """The window at whose start each host function's result is waited for: the first that needs it.

        Of what is trained on group by group that is the stream.
        """
        needing = {
            h: [self._begins(w) for w in self.schedule.windows if h in self._inputs(w)] for h in self.schedule.hosts
        }
        return {h: (windows or [self.last_window["P2"]])[0] for h, windows in needing.items()}

    def _begins(self, window: Window) -> str:
        stream = self.schedule.stream
        return stream.name if stream and window in self.schedule.streaming else window.name

    def _inputs(self, window: Window) -> tuple[str, ...]:
        """Values that the trainer's work of a window takes; decoding is the rollout engine's."""
        if window.kind not in ("prefix", "score", "train"):
            return ()
        return tuple(dict.fromkeys(v for c in self.schedule.work(window) for v in self.schedule.inputs[c.node]))

    def _window_end(self, window: Window) -> Iterator[Step]:
        name = window.name
        if window.kind in ("decode", "stream") and name == self.schedule.turn_windows(window.turn)[-1]:
            last = self.streamed_groups[-1] if self.streamed_groups else 0
            yield Wait(window=name, event=self.of_group((window.node,), last)[0])
        if name == self.last_window["P1"]:
            yield Barrier(window=name, name=ROLLOUT_COMPLETE)
            if self.released(name):
                yield Wait(window=name, event=RELEASED)
        if name == self.last_window["P2"]:
            yield from self.peers_let_go(name)
            yield Barrier(window=name, name=THETA_QUIET)
            yield from self.let_go(name)
        if name == self.last_window["P3"]:
            yield Barrier(window=name, name=PUBLISHED)

    def _work(self, window: Window) -> Iterator[Step]:
        match window.kind:
            case "prefix":
                yield from (self._prefix(window, m) for m in self._groups(window))
            case "stream":
                yield from self._stream(window)
            case "score":
                yield from (step for m in self._groups(window) for step in self._score_group(window, m))
            case "train":
                yield from (step for m in self._groups(window) for step in self._train_group(window, m))
                yield from self._finish(window)
            case "update":
                yield from self._update(window)
            case "publish":
                yield from self._publish(window)
            case "decode":
                return

    def _groups(self, window: Window) -> range:
        """Prompt groups of a step that a rank of the window's role works on: for a prefix all that may be taken."""
        job = self.module.job
        if window in self.schedule.streaming:
            return self.streamed_groups[-1:]  # those before it are worked on in the stream
        return range(job.prefixes_of(window.role) if window.kind == "prefix" else job.prompts_of(window.role))

    def _stream(self, window: Window) -> Iterator[Step]:
        """Group after group, each as soon as it is complete, all that P2 does with the last one."""
        for m in self.streamed_groups[:-1]:
            for work in self.schedule.streaming:
                yield from self._parts(work, window.name, m)
                here = replace(work, name=window.name)
                yield from self._score_group(here, m) if work.kind == "score" else self._train_group(here, m)

    def _weights(self, window: Window) -> tuple[str, ...]:
        """Weights that a role's model reads in a window; a frozen tower may be the policy's own."""
        call, role = self._call(window), window.role
        own = self._language(role, call.trained)
        looks = window.kind == "prefix" or call.op == "whole"
        if looks or (window.kind == "train" and trains_vision(self.module.job, role)):
            own = (*own, self._tower(role))
        return self.placed(window.name, "hbm", *own)

    def _language(self, role: str, trained: bool) -> tuple[str, ...]:
        """Language weights of a role: adapters beside a base, which may be another role's whole model."""
        if trained:
            return tuple(n for n in (f"{role}.base", f"{role}.snapshot") if n in self.module[Lifetimes])
        own = f"{role}.weights"
        return (own if own in self.module[Lifetimes] else f"{self.policy}.base",)

    def _tower(self, role: str) -> str:
        own = f"{role}.vision"
        return own if own in self.module[Lifetimes] else f"{self.policy}.vision"

    def _prefix(self, window: Window, microbatch: int) -> Step:
        call, role, at = self._call(window), window.role, window.name
        saved = (turned(f"{role}.prefix_saved", call.turn),) if call.trained else ()
        own_room = turned(f"{role}.prefix_workspace", call.turn)
        room = self._activations(role) if self.module.job.with_group(role) else own_room
        return Run(
            window=at, task="prefix", node=call.node, role=role, microbatch=microbatch,
            reads=(*self._weights(window), *self._pieces(call, at)),
            writes=self.placed(at, "hbm", turned(f"{role}.boundary", call.turn), room, *saved, *self._shared_room),
            streams=self.placed(at, "host", *saved),
            inputs=(*self._inputs(window), *self._choice(window)),
        )  # fmt: skip

    def _choice(self, window: Window) -> tuple[str, ...]:
        """The rollout, for prefixes that run when it is known which of the sampled prompts a step takes."""
        known = window.phase == "P2" and self.module.job.workload.rollout.kind != "full"
        return tuple(c.node for c in self.schedule.generates) if known else ()

    def _pieces(self, call: Call, window: str) -> tuple[str, ...]:
        """The pieces of a boundary that a call goes on from."""
        turns = range(1, len(call.boundaries) + 1)
        return self.placed(window, "hbm", *(turned(f"{call.role}.boundary", t) for t in turns))

    def _call(self, window: Window) -> Call:
        return next(c for c in self.schedule.calls if c.node == window.node)

    def _score_group(self, window: Window, microbatch: int) -> Iterator[Step]:
        yield from (self._score(window, call, microbatch) for call in self.schedule.work(window))

    def _score(self, window: Window, call: Call, microbatch: int) -> Step:
        """The suffix on its boundary, or the whole call."""
        role, at, task = window.role, window.name, call.op
        assert task in ("suffix", "whole")
        return Run(
            window=at, task=task, node=call.node, role=role, microbatch=microbatch,
            reads=(*self._weights(window), *self._pieces(call, at)),
            writes=self.placed(at, "hbm", f"{role}.score_workspace", *self._shared_room),
            inputs=self.of_group(self.schedule.inputs[call.node], microbatch), outputs=(call.node,),
        )  # fmt: skip

    def _train_group(self, window: Window, microbatch: int) -> Iterator[Step]:
        """Forward and backward of a group, its prefixes first where they run with it.

        A later piece's backward adds to the gradients of those before it.
        """
        prefixes = self.schedule.prefixes(window.role) if self._call(window).op == "suffix" else ()
        for prefix in prefixes if self.module.job.with_group(window.role) else ():
            yield self._prefix(replace(window, kind="prefix", node=prefix.node), microbatch)
        yield from (self._train_step(window, call, microbatch) for call in self.schedule.work(window))
        yield from (self._prefix_backward(window, prefix, microbatch) for prefix in reversed(prefixes))

    def _finish(self, window: Window) -> Iterator[Step]:
        """Behind the last group: gradients of all replicas, and their norm. In pieces they are reduced, and gone."""
        at, role = window.name, window.role
        gradients, op = f"{role}.gradients", self._reduction(role)
        gone = self.leaves_in_pieces(gradients, at)
        if op and not gone:
            nbytes = self.module[Lifetimes][gradients].nbytes
            yield Exchange(window=at, group="dp", op=op, object=gradients, nbytes=nbytes)
        norm = "norm" if role == self.policy else f"{role}.norm"
        update = self.schedule.call("update", role)
        assert update is not None
        yield Run(
            window=at, task="grad_norm", node=update.node, role=role,
            reads=() if gone else (gradients,), streams=(gradients,) if gone else (),
            inputs=self.of_all(split_loss(self.module.graph, role).divisor_inputs), outputs=(norm,),
        )  # fmt: skip

    def _reduction(self, role: str) -> Literal["", "all_reduce", "reduce_scatter"]:
        """How the gradients of all replicas are summed; empty where there is one."""
        job = self.module.job
        if job.degrees(role).replicas == 1:
            return ""
        return "reduce_scatter" if job.cuts_optimizer(role) else "all_reduce"

    def _pieces_of(self, role: str) -> tuple[Piece, ...]:
        """The gradients as the backward ends them, which the plan has at the host from then on."""
        name, op = f"{role}.gradients", self._reduction(role)
        found = leaving(self.module.job, role, self.module[Lifetimes][name].nbytes)
        assert found is not None, f"{name} leaves in pieces, and gains nothing"
        return tuple(Piece(object=name, start=start, stop=stop, reduce=op) for start, stop in found.pieces)

    def _train_step(self, window: Window, call: Call, microbatch: int) -> Step:
        role, at = window.role, window.name
        taken = any(call.node in self._inputs(w) for w in self.schedule.windows)
        return Run(
            window=at, task="train", node=call.node, role=role, microbatch=microbatch,
            reads=(*self._weights(window), *self._pieces(call, at)),
            writes=self.placed(at, "hbm", f"{role}.gradients", self._activations(role)),
            inputs=self.of_group(self.schedule.inputs[call.node], microbatch), outputs=(call.node,) if taken else (),
        )  # fmt: skip

    @property
    def _shared_room(self) -> tuple[str, ...]:
        """Where everything is resident all the time, temporaries of all work are taken from the activations' room."""
        return (self._activations(self.policy),) if self.schedule.kind == "naive" else ()

    def _activations(self, role: str) -> str:
        return activations_name(self.module.job, role)

    def _prefix_backward(self, window: Window, prefix: Call, microbatch: int) -> Step:
        role, at = window.role, window.name
        saved, own = (turned(f"{role}.{name}", prefix.turn) for name in ("prefix_saved", "boundary"))
        # What was dropped is made again from the pixels, through a tower that may itself be frozen.
        dropped = self.place(saved, at) == "dropped" and not trains_vision(self.module.job, role)
        again = self.placed(at, "hbm", self._tower(role)) if dropped else ()
        last = prefix.turn == 1 and microbatch == self.module.job.prompts_of(role) - 1
        gone = last and self.leaves_in_pieces(f"{role}.gradients", at)
        return Run(
            window=at, task="prefix_backward", node=prefix.node, role=role, microbatch=microbatch,
            reads=(*self._weights(window), *again, *self._pieces(prefix, at), *self.placed(at, "hbm", own, saved)),
            writes=self.placed(at, "hbm", f"{role}.gradients", self._activations(role)),
            streams=self.placed(at, "host", saved), inputs=self.schedule.inputs[prefix.node],
            offloads=self._pieces_of(role) if gone else (),
        )  # fmt: skip

    def _update(self, window: Window) -> Iterator[Step]:
        job, role, at = self.module.job, window.role, window.name
        chunks = self.module[Chunks].summary.of(role)
        total = updated_parameters(job, role)
        state = (f"{role}.gradients", f"{role}.master", f"{role}.moments")
        tower = (f"{role}.vision",) if trains_vision(job, role) else ()
        workspace = workspace_name(job, role)
        parts = self.rewritten if role == self.policy else ()
        for index in range(chunks.count):
            start = index * chunks.elements
            yield from self.comes(at, parts, index)
            yield UpdateChunk(
                window=at, role=role, index=index, start=start, stop=min(start + chunks.elements, total),
                reads=self.placed(at, "hbm", *state),
                writes=self.placed(at, "hbm", f"{role}.snapshot", *tower, workspace, f"{role}.adam", *state[1:]),
                streams=self.placed(at, "host", *state),
            )  # fmt: skip
            yield from self.goes(at, parts, index)
        if others := lacking_parameters(job, role):
            nbytes = others * job.itemsize
            yield Exchange(window=at, group="dp", op="all_gather", object=f"{role}.snapshot", nbytes=nbytes)
        if role != self.policy:  # nobody else reads it: there is nothing to exchange or rebuild
            yield Publish(window=at, object=f"{role}.snapshot")

    def _publish(self, window: Window) -> Iterator[Step]:
        at, snapshot = window.name, f"{window.role}.snapshot"
        layout = self.module[Layout].summary
        yield from self.refresh("train", at)
        yield from self.handed_out(at)
        if nbytes := self.from_peers:
            yield Exchange(window=at, group="q", op="write", object=snapshot, nbytes=nbytes)
        if layout.tower_bytes and not self.second_copy:
            tower = f"{window.role}.vision"
            yield Exchange(window=at, group="pp", op="broadcast", object=tower, nbytes=layout.tower_bytes)
        frozen = lora_of(self.module.job) is not None  # a base whose case-3 tensors were made with it
        if (buffer := self.placed(at, "hbm", f"{window.role}.case3")) and not frozen:
            yield Rebuild(window=at, object=buffer[0], reads=(snapshot,))
        yield from self.taken(at)
        yield Publish(window=at, object=snapshot)
