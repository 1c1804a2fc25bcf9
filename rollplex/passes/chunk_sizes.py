"""How finely work is cut: optimizer chunks, responses a suffix step (paper section 3.2, chunked update).

Data        P       parameters a rank updates        s    chunks in flight (load, update, return)
            B       bytes of one parameter in flight: gradient, master weight and two moments; where all of them are
                    resident the update is in place (s = 1) and B is what Adam itself allocates
            R[w]    room: capacity less what residency holds in window w, workspaces left out
            M, W[m,w]   divisors m of the group, and the bytes of suffix workspaces in w with m responses a step
            a, L    microseconds of one element through the host link (zero where the state is resident), of one launch
Variables   K       chunks                           E    elements of one chunk, a multiple of 64
            x[m]    m responses a suffix step
Constraints (1)  K E >= P,  (K - 1) E < P                       the chunks cover the parameters, none is empty
            (2)  s E B <= R[update]                             the pipeline fits beside snapshot and gradients
            (3)  sum_m x[m] = 1
            (4)  sum_m W[m,w] x[m] <= R[w]                      for every window w that uses a suffix workspace
Objective   suffix steps a group, then update time (K + s - 1)(a E + L), then workspace bytes
When not even one response, or the finest chunk, fits, the smallest sizes are kept: the residency pass has already said
that the job is over capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ortools.sat.python import cp_model

from rollplex.ir.job import Job
from rollplex.ir.job_schema import MAX_CHUNKS
from rollplex.ir.module import Module
from rollplex.ir.plan import ChunkSummary, Microbatches, OptimizerChunks, SolverResult
from rollplex.passes.costs import Costs
from rollplex.passes.inventory import (
    MIN_CHUNKS,
    chunk_bytes_per_element,
    chunks_in_flight,
    pages,
    workspace_bytes_per_element,
)
from rollplex.passes.residency import Residency
from rollplex.passes.schedule import Schedule
from rollplex.passes.solver import Objective, Solution, minimise
from rollplex.passes.state import Lifetimes, SizeChoice
from rollplex.passes.work import trained_parameters

ALIGN = 64
"""Chunks begin at multiples of this many elements, so that vector kernels see the same lanes for any chunk size."""
LAUNCH_US = 300


@dataclass(frozen=True)
class Chunks:
    """Chosen sizes; `nbytes` replaces the smallest sizes that lifetimes assumed for the workspaces."""

    made_by: ClassVar[str] = "chunk-sizes"
    summary: ChunkSummary
    nbytes: dict[str, int]
    solvers: tuple[SolverResult, ...]

    def __str__(self) -> str:
        o, m = self.summary.optimizer, self.summary.microbatch
        return f"optimizer {o.count} chunks of {o.bytes / 2**20:.1f} MiB, {m.suffix_responses} responses a suffix step"


@dataclass(frozen=True)
class Data:
    """Numbers of the docstring."""

    job: Job
    parameters: int
    in_flight: int
    element_bytes: int
    room: dict[str, int]
    choices: tuple[SizeChoice, ...]
    windows_of: dict[str, tuple[str, ...]]
    update_window: str
    ns_per_element: int
    whole: bool


def gather(module: Module) -> Data:
    """Read the data off the module's facts."""
    job, schedule, lifetimes, residency = module.job, module[Schedule], module[Lifetimes], module[Residency]
    scalable = {name for choice in lifetimes.choices for name in choice.nbytes} | {"optimizer.workspace"}
    room = {
        w: job.capacity_bytes
        - sum(o.nbytes for o in lifetimes.objects if residency.place(o.name, w) == "hbm" and o.name not in scalable)
        for w in schedule.names()
    }
    update = schedule.names("update")[0]
    state = [f"{job.policy}.{name}" for name in ("master", "moments", "gradients")]
    streamed = any(residency.place(name, update) == "host" for name in state)
    ns = Costs(job).link_s(3 * chunk_bytes_per_element(job) // 4) * 1e9 if streamed else 0
    return Data(
        job=job,
        parameters=trained_parameters(job, job.policy),
        in_flight=chunks_in_flight(job) if streamed else 1,
        element_bytes=workspace_bytes_per_element(job, streamed),
        room=room,
        choices=lifetimes.choices,
        windows_of={o.name: tuple(o.uses) for o in lifetimes.objects},
        update_window=update,
        ns_per_element=max(1, round(ns * 1000)),
        whole="optimizer.workspace" not in lifetimes,
    )


@dataclass(frozen=True)
class Variables:
    """K, E and x[m] of the docstring."""

    count: cp_model.IntVar
    units: cp_model.IntVar
    step: dict[int, cp_model.IntVar]


def build(data: Data) -> tuple[cp_model.CpModel, Variables, list[Objective]]:
    """The CP-SAT model of the docstring; elements are counted in units of 64."""
    model = cp_model.CpModel()
    total = -(-data.parameters // ALIGN)
    count = model.new_int_var(1, min(MAX_CHUNKS, total), "K")
    units = model.new_int_var(1, total, "E")
    step = {c.responses: model.new_bool_var(f"x[{c.responses}]") for c in data.choices}
    _cover(model, data, count, units, total)
    _update_room(model, data, units)
    _suffix_room(model, data, step)
    steps = sum(data.job.group // m * x for m, x in step.items())
    workspace = data.in_flight * units
    return (
        model,
        Variables(count, units, step),
        [
            Objective("suffix steps a group", steps),
            Objective("update seconds", _time(model, data, count, units, total), 1e-6),
            Objective("optimizer workspace bytes", workspace, ALIGN * data.element_bytes),
        ],
    )


def _cover(model: cp_model.CpModel, data: Data, count: cp_model.IntVar, units: cp_model.IntVar, total: int) -> None:
    """(1), and the job's own number of chunks where it names one."""
    product = model.new_int_var(0, 2 * total + MAX_CHUNKS, "KE")
    model.add_multiplication_equality(product, [count, units])
    model.add(product >= total)
    model.add(product - units < total)
    if data.job.optimizer.chunks != "auto":
        model.add(count == attainable(total, int(data.job.optimizer.chunks)))


def attainable(total: int, chunks: int) -> int:
    """The number of chunks nearest below the wanted one that equal sizes in whole units can give."""
    return -(-total // -(-total // min(chunks, total)))


def _update_room(model: cp_model.CpModel, data: Data, units: cp_model.IntVar) -> None:
    """(2); at least the workspace that the residency pass reserved."""
    unit_bytes = ALIGN * data.element_bytes * data.in_flight
    reserved = -(-data.parameters // MIN_CHUNKS) * data.element_bytes * data.in_flight
    room = max(data.room[data.update_window], reserved + unit_bytes)
    model.add(units * unit_bytes <= room)


def _suffix_room(model: cp_model.CpModel, data: Data, step: dict[int, cp_model.IntVar]) -> None:
    """(3) and (4); the smallest step is always allowed."""
    smallest = dict(data.choices[0].nbytes.items())
    model.add_exactly_one(step.values())
    for name, least in smallest.items():
        for window in data.windows_of.get(name, ()):
            room = max(data.room[window], least)
            model.add(sum(c.nbytes[name] * step[c.responses] for c in data.choices) <= room)


def _time(
    model: cp_model.CpModel, data: Data, count: cp_model.IntVar, units: cp_model.IntVar, total: int
) -> cp_model.IntVar:
    """(K + s - 1)(a E + L) in microseconds, rounded up."""
    chunk_us = model.new_int_var(0, 10**11, "chunk_us")
    model.add(chunk_us * 10**6 >= units * (ALIGN * data.ns_per_element) + LAUNCH_US * 10**6)
    update_us = model.new_int_var(0, 10**13, "update_us")
    model.add_multiplication_equality(update_us, [chunk_us, count + (data.in_flight - 1)])
    return update_us


def read(data: Data, variables: Variables, solution: Solution) -> Chunks:
    """Sizes as a summary and as bytes of the scalable objects."""
    page = data.job.device.page_bytes
    elements = min(solution.value(variables.units) * ALIGN, data.parameters)
    count = -(-data.parameters // elements)
    workspace = 0 if data.whole else pages(data.in_flight * elements * data.element_bytes, page)
    chosen = next(c for c in data.choices if solution.true(variables.step[c.responses]))
    sizes = dict(chosen.nbytes) | ({} if data.whole else {"optimizer.workspace": workspace})
    optimizer = OptimizerChunks(
        count=count,
        elements=elements,
        bytes=elements * chunk_bytes_per_element(data.job),
        workspace_bytes=workspace,
    )
    microbatch = Microbatches(prefix_prompts=1, suffix_responses=chosen.responses, workspace_bytes=dict(chosen.nbytes))
    return Chunks(ChunkSummary(optimizer=optimizer, microbatch=microbatch), sizes, solution.results)


def whole_update(data: Data) -> Chunks:
    """One chunk over resident state: what the schedule without a chunked optimizer does."""
    chosen = data.choices[0]
    optimizer = OptimizerChunks(
        count=1, elements=data.parameters, bytes=data.parameters * chunk_bytes_per_element(data.job), workspace_bytes=0
    )
    microbatch = Microbatches(prefix_prompts=1, suffix_responses=chosen.responses, workspace_bytes=dict(chosen.nbytes))
    return Chunks(ChunkSummary(optimizer=optimizer, microbatch=microbatch), dict(chosen.nbytes), ())


@dataclass(frozen=True)
class ChunkSizesPass:
    """Solve optimizer chunks and responses a suffix step from the room that residency leaves (CP-SAT)."""

    name: ClassVar[str] = "chunk-sizes"
    makes: ClassVar[type] = Chunks

    def run(self, module: Module) -> Module:
        """Solve; see the module's docstring."""
        data = gather(module)
        if data.whole:
            return module.put(whole_update(data))
        model, variables, objectives = build(data)
        solver = module.job.solver
        solution = minimise(model, self.name, objectives, seconds=solver.seconds, seed=solver.seed)
        assert solution is not None, "the smallest sizes are always allowed"
        return module.put(read(data, variables, solution))
