"""What kind of thing an object is, for its colour: eight families in the colours of Okabe and Ito, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollplex.ir.plan import PlannedObject


@dataclass(frozen=True)
class Family:
    """A colour of the pictures: its key in the style sheet, what it stands for, its colour by day and by night."""

    key: str
    name: str
    light: str
    dark: str


FAMILIES = (
    Family("engine", "contexts and engine buffers", "#8c8f96", "#8a8d94"),
    Family("weights", "weights of the policy", "#0072b2", "#2f8fca"),
    Family("frozen", "weights of frozen roles", "#56b4e9", "#6cc0ee"),
    Family("optimizer", "master weights, moments, chunks", "#cc79a7", "#d488b2"),
    Family("gradients", "gradients", "#d55e00", "#e2762a"),
    Family("boundary", "boundary KV", "#009e73", "#1fae86"),
    Family("kv", "rollout KV cache", "#e69f00", "#eaaa1f"),
    Family("work", "activations and workspaces", "#e3d34a", "#d9cb4f"),
)
_ORDER = {f.key: i for i, f in enumerate(FAMILIES)}


def family(o: PlannedObject, trained: frozenset[str]) -> str:
    """The key of an object's family."""
    if o.name.endswith((".context", ".runtime")):
        return "engine"
    if o.class_ == "boundary":
        return "boundary"
    if o.class_ == "permanent" or o.name.startswith("optimizer."):
        return "optimizer"
    if "gradient" in o.name:
        return "gradients"
    if o.class_ == "regenerable":
        return "weights" if o.role in trained else "frozen"
    return "kv" if o.process == "rollout" else "work"


@dataclass(frozen=True)
class Shade:
    """The colour of one object: its family, and how far it is mixed with the page, so that neighbours differ."""

    family: str
    mix: int

    @property
    def style(self) -> str:
        """As custom properties of the style sheet."""
        return f"--c:var(--{self.family});--mix:{100 - self.mix}%"


def shades(objects: Sequence[PlannedObject], trained: frozenset[str]) -> dict[str, Shade]:
    """A shade for every object, in the order in which objects are stacked: what stays longest at the bottom."""
    keys = {o.name: family(o, trained) for o in objects}
    ordered = sorted(objects, key=lambda o: _ORDER[keys[o.name]])
    found: dict[str, Shade] = {}
    for o in ordered:
        before = sum(s.family == keys[o.name] for s in found.values())
        found[o.name] = Shade(keys[o.name], min(before, 4) * 16)
    return found
