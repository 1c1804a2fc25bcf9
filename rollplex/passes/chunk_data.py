"""Numbers of the model of chunk sizes (chunk_sizes.py): parameters, bytes in flight, room by window."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from rollplex.ir.job import Job
from rollplex.ir.job_section import MOST_PIECES
from rollplex.ir.module import Module
from rollplex.passes.costs import Costs
from rollplex.passes.releasing import Cuts, fullest
from rollplex.passes.residency import Residency
from rollplex.passes.rewriting import rewritten_objects
from rollplex.passes.schedule import Schedule
from rollplex.passes.state import HeldSizes, Lifetimes, SizeChoice
from rollplex.passes.update_sizes import (
    ALIGN,
    chunks_in_flight,
    flying_bytes_per_element,
    pages,
    streaming_bytes,
    updating_bytes_per_element,
    wanted_chunks,
    workspace_name,
)
from rollplex.passes.work import updated_parameters

NEAR = 64
"""Numbers of chunks that are all tried where an update makes a released snapshot again."""


@dataclass(frozen=True)
class Data:
    """Numbers of the docstring; `alive` are windows of suffix workspaces, `wanted` a stated K, `held` a given E.

    `beside` is S, by E.
    """

    parameters: int
    in_flight: int
    element_bytes: int
    room: dict[str, int]
    choices: tuple[SizeChoice, ...]
    alive: dict[str, tuple[str, ...]]
    update_window: str
    ps_per_element: int
    group: int
    wanted: int | None = None
    held: int | None = None
    updating_bytes: int = 0
    beside: dict[int, int] = field(default_factory=dict)
    page_bytes: int = 1

    @property
    def units(self) -> int:
        """P, rounded up to whole units."""
        return -(-self.parameters // ALIGN)

    def workspace_bytes(self, elements: int) -> int:
        """All that chunks of so many parameters take together, in whole pages: one for the numbers of a step alone."""
        sizes = self.element_bytes, self.updating_bytes
        nbytes = streaming_bytes(self.parameters, elements, self.in_flight, *sizes)
        return max(self.page_bytes, pages(nbytes, self.page_bytes))

    def suffix_bytes(self, choice: SizeChoice, window: str) -> int:
        """W[m,w]: all suffix workspaces that are alive in the window together."""
        return sum(nbytes for name, nbytes in choice.nbytes.items() if window in self.alive[name])


def gather(module: Module) -> Data:
    """The data of the policy's update and of the suffix steps of all roles, from the module's facts."""
    places = module[Residency].places
    dropped = [name for name, by_window in places.items() if "dropped" in by_window.values()]
    choices = tuple(choice.with_dropped(dropped) for choice in module[Lifetimes].choices)
    return _data(module, module.job.policy, module[Schedule].names(), choices)


def gather_update(module: Module, role: str, chosen: SizeChoice) -> Data:
    """The data of another role's update: the suffix step is chosen, and no suffix workspace is alive meanwhile."""
    return _data(module, role, module[Schedule].names("update", role=role), (chosen,))


def _data(module: Module, role: str, windows: tuple[str, ...], choices: tuple[SizeChoice, ...]) -> Data:
    job, schedule, lifetimes, residency = module.job, module[Schedule], module[Lifetimes], module[Residency]
    scalable = {name for choice in lifetimes.choices for name in choice.nbytes}
    chunked = {workspace_name(job, r) for r in schedule.trained}
    (update,) = schedule.names("update", role=role)
    state = [f"{role}.{name}" for name in ("master", "moments", "gradients")]
    at_host = [o.nbytes for o in lifetimes.objects if o.name in state and residency.place(o.name, update) == "host"]
    parameters = updated_parameters(job, role)
    held = module[HeldSizes].chunk_elements if role == job.policy else None
    wanted = wanted_chunks(job, -(-parameters // ALIGN))
    rewritten = rewritten_objects(module) if role == job.policy else {}
    sized = {w: scalable | chunked | (rewritten.keys() if w == update else set()) for w in windows}
    flying, updating = flying_bytes_per_element(job, bool(at_host)), updating_bytes_per_element(job, role)
    least = {update: 0 if flying or updating else job.device.page_bytes}
    return Data(
        parameters=parameters,
        in_flight=chunks_in_flight(job, role) if at_host else 1,
        element_bytes=flying,
        updating_bytes=updating,
        room={w: _room(module, w, names) - least.get(w, 0) for w, names in sized.items()},
        choices=choices,
        alive={name: lifetimes[name].alive(schedule.names()) for name in scalable},
        update_window=update,
        ps_per_element=round(Costs(job).link_s(sum(at_host)) * 1e12 / parameters),
        group=job.group,
        wanted=wanted,
        held=held,
        beside=_beside(job, rewritten, wanted, held),
        page_bytes=job.device.page_bytes,
    )


def _room(module: Module, window: str, scalable: Collection[str]) -> int:
    """R[w]; sizes are whole pages in the end, so a part of a page is no room."""
    page, residency = module.job.device.page_bytes, module[Residency]
    job = module.job
    beside = (o for o in module[Lifetimes].objects if job.pool(o.process) == job.pool("train"))
    fixed = (o for o in beside if o.name not in scalable)
    held = sum(o.nbytes for o in fixed if residency.place(o.name, window) == "hbm")
    return (module.job.capacity_bytes - held) // page * page


def _beside(job: Job, rewritten: dict[str, int], wanted: int | None, held: int | None) -> dict[int, int]:
    """S[E] of the chunk that is given, or of every number up to NEAR and then of evenly more."""
    if not rewritten:
        return {}
    units = -(-updated_parameters(job, job.policy) // ALIGN)
    counts = list(range(1, NEAR + 1))
    while counts[-1] < min(MOST_PIECES, units):
        counts.append(min(MOST_PIECES, units, counts[-1] + -(-counts[-1] // 16)))
    sizes = {-(-units // min(k, units)) for k in ([wanted] if wanted else counts)}
    sizes = {-(-held // ALIGN)} if held else sizes
    snapshot, gradients = rewritten[f"{job.policy}.snapshot"], rewritten.get(f"{job.policy}.gradients", 0)
    cuts = Cuts.of(job, snapshot, gradients)
    return {e: fullest(cuts, e * ALIGN).held(gradients > 0) for e in sorted(sizes)}
