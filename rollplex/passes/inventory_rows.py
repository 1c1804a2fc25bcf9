"""What the rows of an inventory share: the job under its schedule, the switches, the windows of a role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

from rollplex.backends.facts import EngineFacts, load_facts
from rollplex.ir.job import Job
from rollplex.ir.lora import lora_of, merges
from rollplex.ir.plan import Residency
from rollplex.passes.schedule import Kind, Schedule, Window
from rollplex.passes.state import Use
from rollplex.passes.work import one_copy, weight_bytes


class Places(TypedDict):
    """Whether an object stays in HBM, and where else it may be."""

    always: bool
    options: frozenset[Residency]


@dataclass(frozen=True)
class Rows:
    """The questions that objects are made from."""

    job: Job
    schedule: Schedule
    case3_bytes: int
    gathers: tuple[int, ...] = ()
    """GPUs of the groups of several nodes that the shared snapshot comes from."""
    held_elements: int | None = None

    # ---- switches

    @property
    def naive(self) -> bool:
        """Overlap with nothing released, shared, streamed or recomputed (paper section 2.4.1)."""
        return self.schedule.kind == "naive"

    def off(self, mechanism: str) -> bool:
        """Whether a mechanism of section 3 is switched off."""
        return self.naive or mechanism in self.job.ablate

    @property
    def apart(self) -> bool:
        """Whether rollout has GPUs of its own."""
        return self.schedule.kind == "disaggregated"

    @property
    def shared(self) -> bool:
        """Whether both engines read one copy of the policy's weights."""
        return one_copy(self.job)

    # ---- helpers

    def uses(self, windows: Iterable[str], how: Use = "hbm") -> dict[str, Use]:
        """These windows as uses of one kind, in the schedule's order."""
        return {w.name: how for w in self.schedule.windows if w.name in set(windows)}

    def role_windows(self, role: str, *kinds: Kind, turn: int = 0) -> tuple[str, ...]:
        """The role's windows of these kinds; of one turn, if it is named."""
        found = (w for w in self.schedule.windows if self._busy(w, role, kinds))
        return tuple(w.name for w in found if turn in (0, w.turn))

    def _busy(self, window: Window, role: str, kinds: tuple[Kind, ...]) -> bool:
        """Whether a role does one of these kinds of work in a window; all of P2's is in the stream too."""
        if window.kind == "stream":
            return any(self.schedule.works_in(role, kind) for kind in kinds)
        does: tuple[Kind, ...] = (window.kind,)
        if window.kind == "train" and self.job.with_group(window.role):
            does = ("prefix", "train")
        return window.role == role and any(kind in kinds for kind in does)

    def piece_windows(self, role: str, turn: int) -> tuple[str, ...]:
        """Windows that use a piece of a role's boundary: its own turn's prefix, those that extend it, the suffixes."""
        made = (w for w in self.schedule.windows if w.role == role and w.kind == "prefix" and w.turn >= turn)
        return (*(w.name for w in made), *self.role_windows(role, "score", "train"))

    def facts(self, role: str) -> EngineFacts:
        """The facts of the engine that trains or scores a role."""
        return load_facts(self.job.trainer(role).engine)

    def frozen(self) -> list[str]:
        """Roles that score and are not trained."""
        return sorted({c.role for c in self.schedule.calls if c.op in ("prefix", "suffix", "whole") and not c.trained})

    def trained(self) -> tuple[str, ...]:
        """Roles that are updated, the policy first."""
        return tuple(r for r in self.job.trained if self.schedule.call("update", r))

    @property
    def dtype(self) -> str:
        """The dtype of weights as titles have it."""
        return "BF16" if self.job.model.dtype == "bfloat16" else self.job.model.dtype

    def language_bytes(self, role: str) -> int:
        """Language weights of a role on one rank of its training or scoring engine."""
        return weight_bytes(self.job, role, "language")

    def whole(self, role: str) -> bool:
        """Whether the role's call is not split into prefix and suffix."""
        return self.schedule.call("whole", role) is not None

    # ---- weights of the policy

    @property
    def lora(self) -> bool:
        """Whether the policy is trained through adapters."""
        return lora_of(self.job) is not None

    @property
    def _decode(self) -> tuple[str, ...]:
        """Windows in which the rollout engine reads what it shares."""
        return self.schedule.decode_windows if self.shared else ()

    def _kept(self, role: str) -> Places:
        """The policy's weights stay in HBM, unless its engine may offload them."""
        may = self.job.whole_sequences(role) and self.job.trainer(role).offload_parameters and not self.naive
        return {"always": not may, "options": frozenset({"hbm", "host"} if may else ())}

    def _format(self, role: str) -> str:
        """The dtype of what an update rewrites, in titles."""
        return "FP32" if self.job.zero(role) == 3 and self.job.itemsize == 2 else self.dtype

    def written(self) -> tuple[str, ...]:
        """Windows in which the rollout engine's own copies are there to be written."""
        # A sleeping engine wakes when the update has given back its room; any other lies there anyway.
        return self.role_windows(self.job.policy, *(("publish",) if self._sleeps else ("update", "publish")))

    def _asleep(self) -> Places:
        """A rollout engine beside a trainer that shares nothing sleeps while that works (vLLM's level 1)."""
        return {"always": not self._sleeps, "options": frozenset({"host"} if self._sleeps else ())}

    @property
    def _sleeps(self) -> bool:
        return self.job.whole_sequences(self.job.policy) and not (self.apart or self.off("rollout_release"))

    def _why_second(self) -> str:
        """Why the rollout engine has weights of its own."""
        if merges(self.job):
            return "base and adapters, merged at publication: a second copy, so nothing is shared"
        if self.apart:
            return "the rollout pool's own copy"
        sleeping = self.job.whole_sequences(self.job.policy)
        return "a second copy, asleep while the trainer works" if sleeping else "a second copy: weight sharing is off"
