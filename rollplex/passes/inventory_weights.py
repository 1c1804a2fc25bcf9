"""Weights and processes: what is there before any work of an iteration, and which windows read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollplex.ir.lora import merges
from rollplex.ir.plan import Residency
from rollplex.ir.serving import all_reduce_bytes
from rollplex.ir.work import trains_vision
from rollplex.passes.inventory_adapters import AdapterRows
from rollplex.passes.inventory_rows import Places
from rollplex.passes.state import StateObject
from rollplex.passes.work import communicators, process_bytes, shares_tower, weight_bytes


@dataclass(frozen=True)
class WeightRows(AdapterRows):
    """Makes the objects that hold weights."""

    # ---- processes

    def _contexts(self) -> Iterator[StateObject]:
        """What each process takes of its GPU before it allocates anything: no plan moves or releases it."""
        for process, title in (("train", "training"), ("rollout", "rollout")):
            groups = communicators(self.job, process, self.gathers if self.shared else ())
            buffers = all_reduce_bytes(self.job) if process == "rollout" else 0
            over = f", NCCL over {', '.join(groups)}" if groups else ""
            yield StateObject(
                f"{process}.context", f"{title} CUDA context{', NCCL' if groups else ''}", "permanent", "",
                process_bytes(self.job, groups, buffers), {}, process=process, always=True,
                why=f"of the process itself: CUDA context{over}",
            )  # fmt: skip

    # ---- weights of the policy

    def _weights(self) -> Iterator[StateObject]:
        job, role, shared = self.job, self.job.policy, self.shared
        decode = self._decode
        rollout_shard = job.spec.rank_parameters(job.rollout_tp, "language") * job.itemsize
        readers = ("rollout",) if shared else ()
        held = rollout_shard if shared else self.language_bytes(role)
        yield from self._base(held) if self.lora else self._snapshot(held)
        yield StateObject(
            f"{role}.vision", f"{role} vision tower", "regenerable", role, weight_bytes(job, role, "vision"),
            self.uses((*(() if self._cut else decode), *self._seeing())), readers=() if self._cut else readers,
            **self._kept(role),
            why="cut over all ranks" if job.zero(role) == 3 else "replicated on every rank",
        )  # fmt: skip
        yield from self._case3()
        yield from self._buffers()
        vision = -(-job.spec.vision_parameters // (job.rollout_tp if self._cut else 1)) * job.itemsize
        if not shared:
            yield from self._second_copy(rollout_shard, vision)
        elif self._cut:
            yield StateObject(
                "rollout.vision", "rollout vision tower", "regenerable", role, vision,
                self.uses(self.schedule.decode_windows), process="rollout", always=True,
                why="cut over the engine's ranks: a second copy of a frozen tower",
            )  # fmt: skip

    def _snapshot(self, nbytes: int) -> Iterator[StateObject]:
        """Weights that every update rewrites."""
        role, shared = self.job.policy, self.shared
        readers = ("rollout",) if shared else ()
        reading = (*self._decode, *self.role_windows(role, "prefix", "train", "update", "publish"))
        yield StateObject(
            f"{role}.snapshot", f"{role} {self._format(role)} {'snapshot' if shared else 'weights'}", "regenerable",
            role, nbytes, self.uses(reading), readers=readers, **self._kept(role),
            why=f"{'one copy for both engines, ' if shared else ''}rewritten chunk by chunk in P3",
        )  # fmt: skip

    def _case3(self) -> Iterator[StateObject]:
        """What the rollout engine reads in its own row order: made again at publication, or once of a frozen base."""
        role, frozen = self.job.policy, self.lora
        writes = () if frozen else self.role_windows(role, "publish")
        why = "tensors whose row order the engines cannot share"
        if self.shared:
            yield StateObject(
                f"{role}.case3", f"{role} case-3 buffer", "regenerable", role, self.case3_bytes,
                self.uses((*self.schedule.decode_windows, *writes)),
                process="rollout" if frozen else "train", readers=() if frozen else ("rollout",), always=True,
                why=f"{why}; made once, for the base is frozen" if frozen else why,
            )  # fmt: skip

    def _second_copy(self, weights: int, vision: int) -> Iterator[StateObject]:
        """What a rollout engine reads that shares nothing with the trainer."""
        job, role = self.job, self.job.policy
        sent = {"weights": not self.lora or merges(job), "vision": trains_vision(job, role)}
        for name, title, nbytes in (
            ("weights", f"rollout {self.dtype} weights", weights),
            ("vision", "rollout vision tower", vision),
        ):
            writes = self.written() if sent[name] else ()
            yield StateObject(
                f"rollout.{name}", title, "regenerable", role, nbytes,
                self.uses((*self.schedule.decode_windows, *writes)),
                process="rollout", **self._asleep(), why=self._why_second(),
            )  # fmt: skip

    @property
    def _cut(self) -> bool:
        """Whether the rollout engine cuts the tower over its ranks."""
        rollout = self.job.roles[self.job.policy].rollout
        return rollout is not None and rollout.mm_encoder_tp_mode == "weights" and self.job.rollout_tp > 1

    def _seeing(self) -> tuple[str, ...]:
        """Windows in which a trainer runs the policy's tower: a frozen one serves the prefixes of other roles too."""
        job, role = self.job, self.job.policy
        if trains_vision(job, role):
            return self.role_windows(role, "prefix", "train", "update")
        sharing = () if self.naive else (r for r in job.roles if shares_tower(job, r))
        return tuple(w for r in (role, *sharing) for w in self._looking(r))

    def _looking(self, role: str) -> tuple[str, ...]:
        """Windows in which a role's prompts go through a tower."""
        return self.role_windows(role, *(("score", "train") if self.whole(role) else ("prefix",)))

    # ---- weights of the other roles

    def _frozen_weights(self, role: str) -> Iterator[StateObject]:
        if role not in self.lent_to():
            yield StateObject(
                f"{role}.weights", f"{role} {self.dtype} weights", "regenerable", role, self.language_bytes(role),
                self.uses(self.role_windows(role, "prefix", "score")), host_backed=True,
                always=self.naive, options=frozenset({"hbm", "host"}), why="frozen: its host copy stays valid",
            )  # fmt: skip
        yield from self._frozen_tower(role, self._looking(role))

    def _frozen_tower(self, role: str, windows: tuple[str, ...]) -> Iterator[StateObject]:
        if not self.naive and shares_tower(self.job, role):
            return
        yield StateObject(
            f"{role}.vision", f"{role} vision tower", "regenerable", role,
            weight_bytes(self.job, role, "vision"), self.uses(windows), host_backed=True,
            always=self.naive, options=frozenset({"hbm", "host"}), why="frozen: its host copy stays valid",
        )  # fmt: skip

    def _trained_weights(self, role: str) -> Iterator[StateObject]:
        """Of a role that nobody samples from: its snapshot has no readers and may leave HBM, if its engine offloads."""
        windows = self.role_windows(role, "prefix", "train", "update")
        options: frozenset[Residency] = frozenset({"hbm"} if self.off("state_offload") else {"hbm", "host"})
        places: Places = {"always": self.naive, "options": options}
        if self.job.whole_sequences(role):
            places = self._kept(role)
        vision = weight_bytes(self.job, role, "vision")
        parts = [("snapshot", f"{self._format(role)} snapshot", self.language_bytes(role))]
        parts += [("vision", "vision tower", vision)] if trains_vision(self.job, role) else []
        for name, title, nbytes in parts:
            yield StateObject(
                f"{role}.{name}", f"{role} {title}", "regenerable", role, nbytes, self.uses(windows),
                **places, why="trained and not sampled from: no other process reads it",
            )  # fmt: skip
        if not trains_vision(self.job, role):
            again = self.role_windows(role, "train") if self.job.roles[role].prefix_saved == "dropped" else ()
            yield from self._frozen_tower(role, (*self._looking(role), *again))
