"""Objects of the state contract: tensors with one lifetime and one policy (paper section 3.2 and Table 3)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from rollplex.ir.plan import Residency, StateClass

Use = Literal["hbm", "stream"]
START = "start"


@dataclass(frozen=True)
class StateObject:
    """Tensors with one lifetime and one policy, sized for one GPU.

    `uses` says how each window touches it: `hbm` needs the whole object there, `stream` takes it piece by piece over
    the host link unless it is resident. `always` keeps it in HBM in every window. `options` are the places it may be
    in windows that do not need it in HBM. `turn` is that of a saved state's prefix. `by_layer`: a backward makes it
    final layer by layer in the last window that needs it in HBM, so that it may leave beside that.
    """

    name: str
    title: str
    class_: StateClass
    role: str
    nbytes: int
    uses: dict[str, Use]
    produced: str = START
    process: str = "train"
    readers: tuple[str, ...] = ()
    slots: int = 1
    attached: bool = False
    host_backed: bool = False
    recomputable: bool = False
    always: bool = False
    workspace: bool = False
    by_layer: bool = False
    options: frozenset[Residency] = frozenset()
    why: str = ""
    turn: int = 1

    @property
    def final(self) -> str:
        """The last window that needs all of it in HBM: gradients are complete behind its work."""
        return [w for w, how in self.uses.items() if how == "hbm"][-1]

    def alive(self, windows: tuple[str, ...]) -> tuple[str, ...]:
        """Windows in which the object exists: all of them, or from its production to its last use."""
        if self.always or self.produced == START:
            return windows
        used = [windows.index(w) for w in self.uses]
        return windows[windows.index(self.produced) : max(used) + 1]


@dataclass(frozen=True)
class SizeChoice:
    """Bytes of the scalable workspaces when a suffix step takes `responses` responses at a time.

    `again` has, by saved state, the bytes of the workspaces in which it is made again where it is dropped.
    """

    responses: int
    nbytes: dict[str, int]
    again: dict[str, dict[str, int]] = field(default_factory=dict)

    def with_dropped(self, dropped: Collection[str]) -> SizeChoice:
        """The same number of responses, with room to make these saved states again."""
        found = dict(self.nbytes)
        for sizes in (sizes for saved, sizes in self.again.items() if saved in dropped):
            found |= {name: max(found[name], nbytes) for name, nbytes in sizes.items()}
        return replace(self, nbytes=found)


@dataclass(frozen=True)
class Lifetimes:
    """All objects, smallest workspaces first assumed; `choices` lists the larger ones."""

    made_by: ClassVar[str] = "lifetimes"
    objects: tuple[StateObject, ...]
    choices: tuple[SizeChoice, ...] = ()

    def __getitem__(self, name: str) -> StateObject:
        return next(o for o in self.objects if o.name == name)

    def __contains__(self, name: str) -> bool:
        return any(o.name == name for o in self.objects)

    def __str__(self) -> str:
        rows = (
            f"{o.name:<22} {o.nbytes / 2**30:9.3f} GiB  {o.class_:<12} {'attached' if o.attached else '':<9}"
            f" {o.produced} -> {', '.join(o.uses)}"
            for o in self.objects
        )
        return "\n".join(rows)


@dataclass(frozen=True)
class HeldSizes:
    """Parameters of an optimizer chunk that an ablation takes over from the full schedule; None leaves it to solve."""

    made_by: ClassVar[str] = "hold-sizes"
    chunk_elements: int | None = None

    def __str__(self) -> str:
        return f"chunks of {self.chunk_elements:,} parameters" if self.chunk_elements else "nothing is held"
