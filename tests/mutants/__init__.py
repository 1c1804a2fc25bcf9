"""Faults to inject into any plan: `MUTANTS[name].make(plan)` are plans that the checker must refuse as `.kinds`.

Each is a function from a plan to all plans with one such fault; a plan without anything to break that way gives none.
What would do no harm is left out where the faults are made, never when they are found to be accepted.
"""

from mutants import (
    agree,
    capacity,
    form,
    host_pool,
    layout,
    lora,
    order,
    pieces,
    pools,
    release,
    residency,
    roles,
    rounds,
    sharing,
    sizes,
    streamed,
    tail,
    turns,
    update,
    work,
)  # fmt: skip
from mutants.edit import MUTANTS, Mutant

__all__ = [
    "MUTANTS", "Mutant",
    "agree", "capacity", "form", "host_pool", "layout", "lora", "order", "pieces", "pools", "release", "residency",
    "roles", "rounds", "sharing",
    "sizes", "streamed", "tail", "turns",
    "update", "work",
]  # fmt: skip
