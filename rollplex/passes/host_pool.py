"""Static offsets for everything that is ever at the host: the pinned pool is allocated once (design.md section 6).

A window has three times: what is fetched or mapped at its beginning, its work, and what is offloaded at its end.

    P2 train-actor   |begin| work        |end|    saved state is freed by its last use, in the work of the window;
    prefix saved ##########| ########### |        gradients begin at the host where they are offloaded, at its end:
    gradients              |             |####    the two may lie at the same addresses
    in pieces              | ########### |####    unless they leave beside the backward, which needs the saved state

Weights and optimizer state keep their place for the whole iteration, also while a copy of them is in HBM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rollplex.ir.module import Module
from rollplex.ir.plan import SolverResult
from rollplex.ir.planned_pool import LASTING, HostPlace, HostPool
from rollplex.passes.chunk_sizes import Chunks
from rollplex.passes.offsets import Packing, pack
from rollplex.passes.offsets_data import Item
from rollplex.passes.residency import Residency
from rollplex.passes.schedule import Schedule
from rollplex.passes.state import Lifetimes, StateObject

BEGIN, WORK, END = range(3)


@dataclass(frozen=True)
class HostOffsets:
    """The offsets, and what the solver says of them."""

    made_by: ClassVar[str] = "host-pool"
    summary: HostPool
    solvers: tuple[SolverResult, ...]

    def __str__(self) -> str:
        s = self.summary
        rows = [f"{p.offset / 2**30:8.2f} {p.bytes / 2**30:8.2f} GiB  {p.object:<24} {len(p.windows)} windows"
                for p in s.offsets]  # fmt: skip
        return "\n".join([*rows, f"pool {s.bytes / 2**30:.2f} GiB, {s.status}, bound {s.bound_bytes / 2**30:.2f}"])


@dataclass(frozen=True)
class Lives:
    """When each object needs its place in the pinned pool."""

    module: Module

    @property
    def windows(self) -> tuple[str, ...]:
        """All windows in order."""
        return self.module[Schedule].names()

    def span(self, o: StateObject) -> tuple[int, int] | None:
        """Half-open span of times, three a window; None for what is never at the host."""
        windows, residency = self.windows, self.module[Residency]
        there = [w for w in windows if residency.place(o.name, w) == "host"]
        if not there and not o.host_backed:
            return None
        if o.host_backed or o.class_ in LASTING:
            return 0, 3 * len(windows)
        first, last = windows.index(there[0]), windows.index(o.alive(windows)[-1])
        leaves = WORK if o.name in residency.in_pieces else END
        begin = 3 * first + WORK if o.alive(windows)[0] == there[0] else 3 * (first - 1) + leaves
        return begin, 3 * last + END

    def touched(self, span: tuple[int, int]) -> tuple[str, ...]:
        """Windows that a span reaches into."""
        return self.windows[span[0] // 3 : -(-span[1] // 3)]


def place(module: Module) -> HostOffsets:
    """Pack every pool of GPUs by itself; the size is that of the fullest."""
    lives, job = Lives(module), module.job
    at_host = [(o, span) for o in module[Lifetimes].objects if (span := lives.span(o))]
    places: list[HostPlace] = []
    packed: list[Packing] = []
    for pool in dict.fromkeys(job.pool(o.process) for o, _ in at_host):
        mine = [(o, span) for o, span in at_host if job.pool(o.process) == pool]
        items = [Item(o.name, module[Chunks].nbytes.get(o.name, o.nbytes), (span,)) for o, span in mine]
        packed.append(found := pack(items, seconds=job.solver.seconds, seed=job.solver.seed))
        for i in items:
            windows, offset = lives.touched(i.spans[0]), found.offsets[i.name]
            places.append(HostPlace(object=i.name, pool=pool, offset=offset, bytes=i.size, windows=windows))
    return _told(places, packed)


def _told(places: list[HostPlace], packed: list[Packing]) -> HostOffsets:
    size, bound = max((p.size for p in packed), default=0), max((p.bound for p in packed), default=0)
    status = "optimal" if size == bound else "feasible"
    summary = HostPool(bytes=size, bound_bytes=bound, status=status, offsets=tuple(places))
    result = SolverResult(
        name="host-pool", status=status, objective="pool bytes", value=float(size), bound=float(bound)
    )
    return HostOffsets(summary, (result,) if places else ())


@dataclass(frozen=True)
class HostPoolPass:
    """Give everything that is ever at the host a static offset in the pinned pool, as small as can be (CP-SAT)."""

    name: ClassVar[str] = "host-pool"
    makes: ClassVar[type] = HostOffsets
    needs: ClassVar[tuple[type, ...]] = (Schedule, Lifetimes, Residency, Chunks)

    def run(self, module: Module) -> Module:
        """Solve; see the module's docstring."""
        return module.put(place(module))
