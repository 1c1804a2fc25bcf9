"""Sizes of suffix steps in the model of residency: constraints (14) to (16), of workspaces that grow.

m = 8    training activations 23.5 GiB    no second        m = 1    3.9 GiB    8 s of launches more
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollplex.passes.residency import Model


def made_again(m: Model) -> None:
    """(14)."""
    units = {o.name: o.units for o in m.data.items}
    saved = [o for o in m.data.items if o.recomputable]
    for size, o in itertools.product(m.data.sizes, saved):
        for (v, again), w in itertools.product(size.again.get(o.name, {}).items(), o.alive):
            if again > units[v]:
                taken = (m.step[size.responses], m.at[o.name, w, "dropped"])
                m.cp.add(m.grown[v] >= again - units[v]).only_enforce_if(*taken)


def one_step(m: Model) -> None:
    """(15)."""
    m.cp.add_exactly_one(m.step.values())


def larger_steps(m: Model) -> None:
    """(16)."""
    units = {o.name: o.units for o in m.data.items}
    for v, grown in m.grown.items():
        more = (size.units.get(v, units[v]) - units[v] for size in m.data.sizes)
        m.cp.add(grown >= sum(n * x for n, x in zip(more, m.step.values(), strict=True)))
