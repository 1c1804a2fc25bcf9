"""What of a module's plan comes and goes chunk by chunk in the update: its released snapshot, gradients in HBM.

rewritten_objects(module)      {"actor.snapshot": 16384000000, "actor.gradients": 16384000000}     none where it stays
"""

from __future__ import annotations

from rollplex.ir.module import Module
from rollplex.passes.pools import Parts
from rollplex.passes.releasing import Cuts, fullest
from rollplex.passes.residency import Residency
from rollplex.passes.schedule import Schedule
from rollplex.passes.state import Lifetimes


def names(module: Module) -> tuple[str, str]:
    """The policy's snapshot and its gradients."""
    return f"{module.job.policy}.snapshot", f"{module.job.policy}.gradients"


def update_window(module: Module) -> str:
    """The window in which the policy is updated."""
    (window,) = module[Schedule].names("update", role=module.job.policy)
    return window


def rewritten_objects(module: Module) -> dict[str, int]:
    """Bytes of a released snapshot, and of gradients that leave HBM behind the chunks that make it again."""
    residency, lifetimes, update = module[Residency], module[Lifetimes], update_window(module)
    if not residency.released:
        return {}
    return {name: lifetimes[name].nbytes for name in names(module) if residency.place(name, update) == "hbm"}


def fullest_parts(module: Module, elements: int) -> Parts:
    """Bytes of both at the moment at which most is there, where chunks have so many elements."""
    sizes, (snapshot, gradients) = rewritten_objects(module), names(module)
    if not sizes:
        return {}
    then = fullest(Cuts.of(module.job, sizes[snapshot], sizes.get(gradients, 0)), elements)
    found = {snapshot: then.snapshot, gradients: then.gradients}
    return {update_window(module): {name: found[name] for name in sizes}}
