"""What an iteration holds, object by object: the rows behind the paper's Table 1 and Table 3, sized from the job."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rollplex.ir.job import Job
from rollplex.ir.module import Module
from rollplex.ir.plan import Residency
from rollplex.ir.work import Work, one_response, role_work, trains_vision, turn_work, whole_call
from rollplex.passes.inventory_weights import WeightRows
from rollplex.passes.layout import Layout
from rollplex.passes.schedule import Call, Schedule, turned
from rollplex.passes.state import HeldSizes, SizeChoice, StateObject
from rollplex.passes.update_sizes import (
    chunks_in_flight,
    flying_bytes_per_element,
    pages,
    reserved_elements,
    resident_bytes,
    state_itemsize,
    streaming_bytes,
    updating_bytes_per_element,
    workspace_name,
)
from rollplex.passes.work import between_nodes, shares_tower, trained_parameters, updated_parameters

CARRIED = "rollout.carried"
CARRIED_TOKEN_BYTES = 12
"""Of a token of an unfinished response: its id (int32), its log-probability (fp32), its snapshot's number (int32)."""


def activations_name(job: Job, role: str) -> str:
    """The object of a trained role's activations."""
    return "train.activations" if role == job.policy else f"{role}.activations"


@dataclass(frozen=True)
class Inventory(WeightRows):
    """Makes the objects of one job under one schedule."""

    @classmethod
    def of(cls, module: Module) -> Inventory:
        """The inventory of a module that knows its schedule and layout."""
        held, layout = module[HeldSizes].chunk_elements, module[Layout].summary
        gathers = between_nodes(module.job, layout)
        return cls(module.job, module[Schedule], layout.case3_buffer_bytes, gathers, held)

    # ---- all of it

    def objects(self) -> tuple[StateObject, ...]:
        """Every object, in the order they are printed; bytes rounded up to pages."""
        page = self.job.device.page_bytes
        return tuple(replace(o, nbytes=pages(o.nbytes, page)) for o in self._all() if o.nbytes > 0)

    def _all(self) -> Iterator[StateObject]:
        yield from self._contexts()
        yield from self._weights()
        yield from self._rollout()
        for call in self.schedule.calls:
            if call.op == "prefix":
                yield self._boundary(call)
        for role in self.frozen():
            yield from self._frozen_weights(role)
        for role in self.trained():
            if role != self.job.policy:
                yield from self._trained_weights(role)
            yield from self._attached_state(role)
        yield from self._workspaces()
        for role in self.trained():
            yield from self._update(role)

    def choices(self) -> tuple[SizeChoice, ...]:
        """Sizes of the suffix workspaces for every number of responses that divides the group, or the stated one."""
        job, n, page = self.job, self.job.group, self.job.device.page_bytes
        stated = job.trainer(job.policy).microbatch if job.whole_sequences(job.policy) else "auto"
        divisors = [m for m in range(1, n + 1) if n % m == 0] if stated == "auto" else [math.gcd(n, stated)]
        rows = ((m, {o.name: pages(o.nbytes, page) for o in self._suffix_workspaces(m)}) for m in divisors)
        return tuple(SizeChoice(m, sizes, dict(self._made_again(m))) for m, sizes in rows)

    def _made_again(self, responses: int) -> Iterator[tuple[str, dict[str, int]]]:
        """By saved state: the activations of a training step whose prefix backward makes that again first."""
        for role in () if self.naive else (r for r in self.trained() if not self.whole(r)):
            for work in self._works(role, responses):
                nbytes = self.facts(role).train_activation_bytes(replace(work, dropped=True))
                room = pages(nbytes, self.job.device.page_bytes)
                yield turned(f"{role}.prefix_saved", work.turn), {activations_name(self.job, role): room}

    # ---- rollout engine

    def _rollout(self) -> Iterator[StateObject]:
        decode = self.schedule.decode_windows
        kept = self.apart or self.off("rollout_release")
        why = "resident: nobody else has these GPUs" if self.apart else "resident: release is off"
        for name, title, nbytes in (
            ("kv", "rollout KV cache", self.job.kv_cache_bytes),
            ("runtime", "rollout runtime buffers", self.job.runtime_bytes),
        ):
            yield StateObject(
                f"rollout.{name}", title, "phase-local", self.job.policy, nbytes, self.uses(decode),
                produced=decode[0], process="rollout", always=kept,
                why=why if kept else "released when generation ends",
            )  # fmt: skip

        yield from self._carried(decode[0])

    def _carried(self, window: str) -> Iterator[StateObject]:
        """What partial rollout keeps of unfinished responses at the host: an engine may finish none of its own."""
        job = self.job
        if job.workload.rollout.kind != "partial":
            return
        groups = min(job.prompts_per_engine, job.sampled - job.workload.prompts)
        yield StateObject(
            CARRIED, "unfinished responses", "permanent", "",
            groups * job.group * job.workload.response_tokens * CARRIED_TOKEN_BYTES, self.uses((window,), "stream"),
            process="rollout", options=frozenset({"host"}),
            why="tokens, log-probabilities and snapshots of responses that go on in the next step",
        )  # fmt: skip

    # ---- boundaries

    def _boundary(self, call: Call) -> StateObject:
        turn, work = call.turn, turn_work(self.job, call.role, call.turn)
        prompts, several = self.job.boundaries_of(call.role), len(self.schedule.turns) > 1
        windows = self.piece_windows(call.role, turn)
        later = (
            "kept in HBM, on the rank of its trajectories, until suffixes of its own and all later turns have used it"
        )
        return StateObject(
            turned(f"{call.role}.boundary", turn), turned(f"{call.role} boundary KV", turn), "boundary", call.role,
            prompts * work.prefix_tokens * work.kv_bytes, self.uses(windows),
            produced=windows[0], slots=prompts, attached=call.trained, always=self.naive,
            why=later if several else "kept in HBM until its suffix has used it",
        )  # fmt: skip

    # ---- activations

    def _attached_state(self, role: str) -> Iterator[StateObject]:
        """What a trained role's prefixes save for their backward."""
        if self.naive or self.whole(role):
            return
        job, prompts = self.job, self.job.boundaries_of(role)
        for turn in (c.turn for c in self.schedule.prefixes(role)):
            windows = (*self.role_windows(role, "prefix", turn=turn), *self.role_windows(role, "train"))
            each = self.facts(role).prefix_saved_bytes(turn_work(job, role, turn))
            yield StateObject(
                turned(f"{role}.prefix_saved", turn), turned(f"{role} prefix saved state", turn), "phase-local",
                role, prompts * each, self.uses(windows, "stream"),
                produced=windows[0], slots=prompts, attached=True, recomputable=True, options=self._saved_places(role),
                why="needed again by the prefix backward", turn=turn,
            )  # fmt: skip

    def _saved_places(self, role: str) -> frozenset[Residency]:
        """What is dropped is made again through the tower, which only the policy's is sure to be there for."""
        wanted, own = self.job.roles[role].prefix_saved, role != self.job.policy and not shares_tower(self.job, role)
        places: tuple[Residency, ...] = ("hbm", "host", "dropped")
        if wanted == "group":  # made and used in one window
            return frozenset({"hbm"})
        if self.off("state_offload"):
            places = ("hbm",)
        elif wanted == "auto" and own and not trains_vision(self.job, role):
            places = ("hbm", "host")
        return frozenset(p for p in places if wanted in ("auto", p))

    def _workspaces(self) -> Iterator[StateObject]:
        job = self.job
        if self.naive:
            yield from (self._naive_activations(role) for role in self.trained())
            return
        for call in (c for c in self.schedule.calls if c.op == "prefix" and not job.with_group(c.role)):
            work = turn_work(job, call.role, call.turn)
            nbytes = self.facts(call.role).prefix_workspace_bytes(work, call.trained)
            windows = self.role_windows(call.role, "prefix", turn=call.turn)
            name, title = f"{call.role}.prefix_workspace", f"{call.role} prefix workspace"
            yield self._workspace(turned(name, call.turn), turned(title, call.turn), nbytes, windows)
        yield from self._suffix_workspaces(1)

    def _naive_activations(self, role: str) -> StateObject:
        load = self.job.workload
        whole = replace(role_work(self.job, role), prompt_tokens=load.history_tokens(load.turn_count))
        nbytes = self.facts(role).full_activation_bytes(one_response(whole))
        of = "" if role == self.job.policy else f"{role} "
        windows = self.role_windows(role, "train")
        return StateObject(
            activations_name(self.job, role), f"{of}activations, one microbatch", "phase-local", role, nbytes,
            self.uses(windows), produced=windows[0], always=True, workspace=True,
        )  # fmt: skip

    def _suffix_workspaces(self, responses: int) -> Iterator[StateObject]:
        if self.naive:
            return
        for role in self.frozen():
            facts, windows = self.facts(role), self.role_windows(role, "score")
            nbytes = max(facts.score_workspace_bytes(work) for work in self._works(role, responses))
            if self.whole(role):
                nbytes = max(nbytes, facts.prefix_workspace_bytes(role_work(self.job, role), attached=False))
            yield self._workspace(f"{role}.score_workspace", f"{role} scoring workspace", nbytes, windows)
        for role in self.trained():
            nbytes = self._activation_bytes(role, responses)
            title = "training activations" if role == self.job.policy else f"{role} activations"
            yield self._workspace(activations_name(self.job, role), title, nbytes, self.role_windows(role, "train"))

    def _activation_bytes(self, role: str, responses: int) -> int:
        """The largest step of training; a prefix that runs with its group is over when the group's step begins."""
        facts = self.facts(role)
        own = [facts.train_activation_bytes(work) for work in self._works(role, responses)]
        if self.job.with_group(role):
            own.append(facts.prefix_workspace_bytes(role_work(self.job, role), attached=True))
        return max(own)

    def _works(self, role: str, responses: int) -> Iterator[Work]:
        """Suffix steps of every turn on some of a group's responses, or the whole call where it is not split."""
        stated = self.job.trainer(role).microbatch
        if self.job.whole_sequences(role) and stated != "auto":
            responses = stated
        for turn in self.schedule.turns:
            work = one_response(turn_work(self.job, role, turn), responses)
            yield whole_call(work) if self.whole(role) else work

    def _workspace(self, name: str, title: str, nbytes: int, windows: tuple[str, ...]) -> StateObject:
        return StateObject(
            name, title, "phase-local", self.job.policy, nbytes, self.uses(windows), produced=windows[0],
            workspace=True, why="temporaries, released with the window",
        )  # fmt: skip

    # ---- update

    def _update(self, role: str) -> Iterator[StateObject]:
        job, size, parameters = self.job, state_itemsize(self.job), updated_parameters(self.job, role)
        update, train = self.role_windows(role, "update"), self.role_windows(role, "train")
        resident = self.job.whole_sequences(role)  # an optimizer that is not streamed
        kept = self.off("state_offload") or (resident and not job.trainer(role).offload_optimizer)
        whole = self.off("chunked_optimizer") or resident
        options: frozenset[Residency] = frozenset({"hbm"} if kept else {"hbm", "host"})
        uses = self.uses(update, "hbm" if whole else "stream")
        yield StateObject(
            f"{role}.gradients", f"{role} FP{8 * size} gradients", "phase-local", role,
            trained_parameters(job, role) * size,
            {**self.uses(train), **uses}, produced=train[0], always=self.naive, options=options,
            by_layer=bool(self.schedule.prefixes(role)),
            why="accumulated over prompt groups, consumed chunk by chunk",
        )  # fmt: skip
        masters = 0 if job.zero(role) == 3 else 1  # ZeRO-3's weights are the masters
        for name, title, copies in (("master", "master weights", masters), ("moments", "Adam moments", 2)):
            yield StateObject(
                f"{role}.{name}", f"{role} FP{8 * size} {title}", "permanent", role, copies * parameters * size, uses,
                always=self.naive, options=options, why="streamed through the update, never discarded",
            )  # fmt: skip
        if resident:
            nbytes = resident_bytes(job, role, parameters)
            yield self._workspace(f"{role}.adam", f"{role} Adam temporaries", nbytes, update)
        if not (self.naive or whole):
            flying, updating = flying_bytes_per_element(job, True), updating_bytes_per_element(job, role)
            held = self.held_elements if role == job.policy else None
            elements = reserved_elements(job, parameters, held)
            nbytes = streaming_bytes(parameters, elements, chunks_in_flight(job, role), flying, updating)
            title = "optimizer chunks in flight" if role == job.policy else f"{role} optimizer chunks"
            yield self._workspace(workspace_name(job, role), title, nbytes, update)
