"""What LoRA puts in the place of a snapshot that every update rewrites: base weights that none does, and adapters.

actor.base         BF16   trainer, rollout engine and a reference of the same weights read it; never written
actor.case3        BF16   what the rollout engine reads in its own row order: made once, with the base
actor.snapshot     BF16   the adapters, which P3 rewrites chunk by chunk
rollout.adapters   BF16   the rollout engine's buffers, filled at publication
rollout.weights    BF16   where nothing is shared: the base once more, or base and adapters merged at publication
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollplex.ir.lora import merges, reads_base, served_bytes
from rollplex.passes.inventory_rows import Rows
from rollplex.passes.state import StateObject
from rollplex.passes.work import adapter_bytes


@dataclass(frozen=True)
class AdapterRows(Rows):
    """Makes the objects of a policy that is trained through adapters."""

    def lent_to(self) -> tuple[str, ...]:
        """Frozen roles that read the policy's base weights; under naive nothing is shared."""
        return () if self.naive else tuple(r for r in self.job.roles if reads_base(self.job, r))

    # ---- of the trainer

    def _base(self, nbytes: int) -> Iterator[StateObject]:
        """The weights that are never written, and the adapters that are."""
        job, role = self.job, self.job.policy
        merging = self.role_windows(role, "publish") if merges(job) else ()
        reading = (*self._decode, *self.role_windows(role, "prefix", "train"), *merging)
        lent = tuple(w for r in self.lent_to() for w in self.role_windows(r, "prefix", "score"))
        why = "frozen: one copy for both engines" if self.shared else "frozen"
        readers = f"; {' and '.join(self.lent_to())}: the same weights, adapters off" if lent else ""
        yield StateObject(
            f"{role}.base", f"{role} {self.dtype} base weights", "regenerable", role, nbytes,
            self.uses((*reading, *lent)), readers=("rollout",) if self.shared else (), **self._kept(role),
            why=why + readers,
        )  # fmt: skip
        yield StateObject(
            f"{role}.snapshot", f"{role} {self._format(role)} adapters", "regenerable", role, adapter_bytes(job, role),
            self.uses(self.role_windows(role, "prefix", "train", "update", "publish")), **self._kept(role),
            why="adapters, rewritten chunk by chunk in P3",
        )  # fmt: skip

    # ---- of the rollout engine

    def _buffers(self) -> Iterator[StateObject]:
        """The adapters as the rollout engine stacks them, where it serves them."""
        decode, role = self.schedule.decode_windows, self.job.policy
        yield StateObject(
            "rollout.adapters", "rollout adapters", "regenerable", role, served_bytes(self.job),
            self.uses((*decode, *self.written())), process="rollout", **self._asleep(),
            why="the engine's buffers for one adapter of the largest rank that it makes room for",
        )  # fmt: skip
