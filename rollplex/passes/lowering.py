"""What all programs of a lowering share: places of objects, and the steps at which they enter and leave HBM.

An object enters at the start of the window that needs it and leaves at the end of the last that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from rollplex.ir.lora import lora_of, merges
from rollplex.ir.module import Module
from rollplex.ir.parts import of_round, part
from rollplex.ir.plan import BARRIERS
from rollplex.ir.steps import Drop, Exchange, Fetch, Map, Offload, Step, Unmap
from rollplex.ir.work import trains_vision
from rollplex.passes.residency import Residency
from rollplex.passes.rewriting import names, update_window
from rollplex.passes.schedule import Schedule
from rollplex.passes.state import START, Lifetimes, StateObject

ROLLOUT_COMPLETE, THETA_QUIET, PUBLISHED = BARRIERS
RELEASED, WAKE = "rollout-released", "rollout-wakes"


@dataclass(frozen=True)
class Context:
    """One module on its way to steps: where objects are, and the steps at which they move."""

    module: Module

    @property
    def schedule(self) -> Schedule:
        """Windows and calls."""
        return self.module[Schedule]

    @property
    def policy(self) -> str:
        """The role that is trained and sampled from."""
        return self.module.job.policy

    @property
    def last_window(self) -> dict[str, str]:
        """The last window of every phase."""
        return {w.phase: w.name for w in self.schedule.windows}

    @property
    def first(self) -> str:
        """The first window of the iteration."""
        return self.schedule.windows[0].name

    @property
    def prompts(self) -> str:
        """The value that holds the prompts of the step."""
        return next(n.name for n in self.module.graph.nodes if n.op == "placeholder")

    @property
    def second_copy(self) -> str | None:
        """The rollout engine's own weights, where sharing is off."""
        return "rollout.weights" if "rollout.weights" in self.module[Lifetimes] else None

    def refresh(self, process: str, window: str) -> Iterator[Exchange]:
        """Copies of new weights into the rollout engine's own, each entered by both sides; a frozen tower is left."""
        for source, copy in self.refreshed.items():
            name, nbytes = copy if process == "rollout" else source, self.module[Lifetimes][copy].nbytes
            yield Exchange(window=window, group="refresh", op="all_gather", object=name, nbytes=nbytes)

    @property
    def refreshed(self) -> dict[str, str]:
        """What every update changes, the policy's weights or adapters, and the rollout engine's copies of it."""
        if lora_of(self.module.job) is not None:
            copy = self.second_copy if merges(self.module.job) else "rollout.adapters"
            return {f"{self.policy}.snapshot": copy} if copy else {}
        if self.second_copy is None:
            return {}
        tower = trains_vision(self.module.job, self.policy) and "rollout.vision" in self.module[Lifetimes]
        parts = {f"{self.policy}.vision": "rollout.vision"} if tower else {}
        return {f"{self.policy}.snapshot": self.second_copy, **parts}

    def released(self, window: str) -> tuple[Step, ...]:
        """What the rollout engine lets go of at a window's end."""
        return tuple(self.leave("rollout", window))

    @property
    def updating(self) -> str:
        """Where a sleeping rollout engine wakes: its weights are written when the policy is published."""
        return next(w.name for w in self.schedule.windows if w.kind == "publish" and w.role == self.policy)

    @property
    def calls_rollout(self) -> bool:
        """Whether the trainer calls the rollout engine before it publishes: to wake, or to take a copy."""
        return bool(self.woken or self.refreshed)

    @property
    def woken(self) -> tuple[Step, ...]:
        """What a sleeping rollout engine takes back before its weights are written, once the trainer has room."""
        return tuple(self.enter("rollout", self.updating))

    # ---- values group by group

    @property
    def streamed_groups(self) -> range:
        """The prompt groups of a rank, where values come group by group; empty where they come all together."""
        return range(self.module.job.prompts_per_rank if self.schedule.stream else 0)

    def of_group(self, names: tuple[str, ...], group: int) -> tuple[str, ...]:
        """Values as a task on one group takes them: under `streamed` its part of what responses are behind."""
        return tuple(part(n, group) if n in self._parted else n for n in names)

    def of_all(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Values of the whole step, as the parts of all groups where they come so."""
        parts = ([part(n, m) for m in self.streamed_groups] if n in self._parted else [n] for n in names)
        return tuple(chain.from_iterable(parts))

    def in_round(self, names: tuple[str, ...], number: int) -> tuple[str, ...]:
        """Values as a round makes or takes them; the last round's are those of the step."""
        rounds = self.schedule.rounds
        return names if rounds is None or number == rounds.last else tuple(of_round(n, number) for n in names)

    @property
    def _parted(self) -> frozenset[str]:
        if not self.schedule.stream:
            return frozenset()
        late = (h for h in self.schedule.hosts if h not in self.schedule.early)
        return frozenset((*(c.node for c in self.schedule.generates), *late))

    # ---- residency

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

    def leaves_in_pieces(self, name: str, window: str) -> bool:
        """Whether an object leaves beside the backward that ends it; it may be in HBM again later."""
        return name in self.module[Residency].in_pieces and window == self.module[Lifetimes][name].final

    # ---- a snapshot whose pages go, and come back chunk by chunk

    @property
    def remade(self) -> str | None:
        """The snapshot, where its pages are released for the update."""
        return names(self.module)[0] if self.module[Residency].released else None

    def leaves_behind_chunks(self, name: str, window: str) -> bool:
        """Whether an object leaves HBM behind the chunks of a window that use it up."""
        return bool(self.remade) and name == names(self.module)[1] and window == update_window(self.module)

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
            if self.place(o.name, window) != "hbm" or self.leaves_behind_chunks(o.name, window):
                continue
            _, after = self.neighbours(o, window)
            if after == "-" or (after == "host" and o.host_backed):
                yield Unmap(window=window, object=o.name)
            elif after == "host" and not self.leaves_in_pieces(o.name, window):
                yield Offload(window=window, object=o.name)
            elif after == "dropped":
                yield Drop(window=window, object=o.name)
