"""What an ablation holds fixed: the update of the full schedule, so that one mechanism is missing and no more.

ablate=[weight_sharing]      chunks of 1,293,252,416 parameters, 57.8 GiB in flight

An ablation asks what a mechanism is worth (paper section 4.4). Solved anew, the rest of the plan would make up for what
is missing, with finer optimizer chunks. So the chunks are those that the full schedule has room for, the largest: the
paper sizes them so that the pipeline, the snapshot and the gradients fit together (section 3.2). A job that states
`optimizer.chunks` has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from rollplex.ir.job import Job
from rollplex.ir.job_section import MOST_PIECES
from rollplex.ir.module import Module
from rollplex.passes.chunk_data import gather
from rollplex.passes.layout import Layout
from rollplex.passes.lifetimes import LifetimesPass
from rollplex.passes.residency import ResidencyPass
from rollplex.passes.schedule import Schedule
from rollplex.passes.state import HeldSizes, Lifetimes, StateObject
from rollplex.passes.update_sizes import ALIGN, MIN_CHUNKS


def holds(job: Job) -> bool:
    """Whether the update's sizes come from the full schedule; without chunks there are none to hold."""
    return bool(job.ablate) and "chunked_optimizer" not in job.ablate and job.optimizer.chunks == "auto"


def full_schedule(module: Module) -> Module:
    """The module with every mechanism on, through the passes that leave room for its update."""
    full = replace(module, job=module.job.model_copy(update={"ablate": ()})).put(HeldSizes())
    for p in (LifetimesPass(), ResidencyPass()):
        full = p.run(full)
    return full


def largest_chunk(full: Module) -> int:
    """Parameters of the largest chunk that fits beside what the update of the full schedule needs in HBM.

    Where nothing fits, it is the finest chunk that there may be: the plan says by how much that is over. An update of
    states in HBM by a kernel that allocates nothing may have any: it is what residency makes room for by itself.
    """
    data = gather(full)
    finest = -(-data.units // MOST_PIECES)
    needed = sum(o.nbytes for o in full[Lifetimes].objects if _stays(o, data.update_window))
    if not (each := data.in_flight * data.element_bytes + data.updating_bytes):
        return -(-data.units // MIN_CHUNKS) * ALIGN
    room = (full.job.capacity_bytes - needed) // each
    return min(data.parameters, max(room // ALIGN, finest) * ALIGN)


def _stays(o: StateObject, update: str) -> bool:
    """Whether an object must be in HBM during the update; state that is streamed comes in chunk by chunk."""
    return o.name != "optimizer.workspace" and (o.always or o.uses.get(update) == "hbm")


@dataclass(frozen=True)
class HoldSizes:
    """Find the update sizes of the full schedule, for a job that switches a mechanism of it off.

    Job keys: `ablate`, `optimizer.chunks`, `cluster`.
    """

    name: ClassVar[str] = "hold-sizes"
    needs: ClassVar[tuple[type, ...]] = (Schedule, Layout)
    makes: ClassVar[type] = HeldSizes

    def run(self, module: Module) -> Module:
        """Nothing is held where nothing is ablated."""
        return module.put(HeldSizes(largest_chunk(full_schedule(module)) if holds(module.job) else None))
