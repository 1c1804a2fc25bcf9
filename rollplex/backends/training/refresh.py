"""Where the rollout engine has weights of its own: what is copied into them, first of all and after every update.

train      exchange all_gather actor.snapshot over refresh        its pages go out
rollout    exchange all_gather rollout.weights over refresh       and fill those, byte by byte
"""

from __future__ import annotations

import torch

from rollplex.backends.collectives import Pair
from rollplex.backends.memory.planned import PlannedObjects
from rollplex.ir.plan import Plan

REFRESH = "refresh"
START_S = 120.0  # from the first process of a pair that is built to the other


def copies(plan: Plan, policy: str, kind: str) -> dict[str, int]:
    """Bytes of all that the rollout engine has a copy of, by the objects of a process kind; both sides in one order.

    Every part is copied once before the first iteration; a frozen tower never again.
    """
    own = {o.name: o.bytes for o in plan.summary.objects if o.process == "rollout"}
    parts = {"rollout.weights": f"{policy}.snapshot", "rollout.vision": f"{policy}.vision"}
    if "rollout.weights" not in own:
        return {}
    return {part if kind == "train" else copy: own[copy] for copy, part in parts.items() if copy in own}


class Copies:
    """One side of the copies of a plan that has any: `begin` once, then `copy` as the exchanges say."""

    def __init__(self, pair: Pair, objects: PlannedObjects, first: dict[str, int]) -> None:
        self._pair, self._objects, self.first = pair, objects, first

    def begin(self) -> None:
        """Meet the other side, and copy every part."""
        if self.first:
            self._pair.join(START_S)
        for name, nbytes in self.first.items():
            self.copy(name, nbytes)

    def copy(self, name: str, nbytes: int) -> None:
        """The first bytes of an object to the other side, or from there."""
        self._pair.copy(self._objects.pages(name, torch.uint8)[:nbytes])
