"""How finely work is cut: optimizer chunks, responses a suffix step (paper section 3.2, chunked update).

Data        P       parameters a rank updates, in units of 64          s    chunks in flight (load, update, return)
            B       bytes of one unit in flight: gradient, master weight and two moments; nothing where all of them
                    are resident: the update is in place (s = 1)
            A       bytes that Adam allocates for one unit of the chunk that it updates; nothing on a GPU
            R[w]    room: capacity less what residency holds in window w, workspaces left out; whole pages
            M, W[m,w]   divisors m of the group, and the bytes of suffix workspaces alive in w with m responses a step,
                    with room to make again what residency drops
            S[E]    bytes of snapshot and gradients together at the fullest moment of an update with chunks of E units,
                    where it makes a released snapshot again (releasing.py); R[w] is without them then. Else nothing
            a, L    time of one unit through the host link (zero where the state is resident), of one launch
Variables   K       chunks                           E    units of one chunk              KE   their product
            F       units in flight                  x[m]    m responses a suffix step        over[w]  bytes over R[w]
            c       microseconds of one chunk        T    of the update          G    bytes of S[E]
Constraints (1)  KE = K E
            (2)  KE >= P                                        the chunks cover the parameters,
            (3)  KE - E < P                                     and none is empty
            (4)  K = the job's optimizer.chunks                 where it names a number; E = what an ablation holds
            (5)  F = min(s E, KE)                               there may be fewer chunks than may overlap
            (6)  sum_m x[m] = 1
            (7)  sum_m W[m,w] x[m] + (F B + E A + G if w updates) <= R[w] + over[w]
            (8)  c >= a E + L
            (9)  T = (K + s - 1) c
            (10) G = S[E]                                       E one of those that it is known of
Objective   bytes over capacity, then suffix steps a group, then update time, then workspace bytes
Bytes over capacity are what even the smallest sizes lack; the plan then does not fit, and says so by window.
Every trained role has a model of its own, for their updates share no window; that of the policy chooses m for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ortools.sat.python import cp_model

from rollplex.ir.job import Job
from rollplex.ir.job_section import MOST_PIECES
from rollplex.ir.module import Module
from rollplex.ir.plan import ChunkSummary, Microbatches, OptimizerChunks, SolverResult
from rollplex.passes.chunk_data import Data, gather, gather_update
from rollplex.passes.residency import Residency
from rollplex.passes.schedule import Schedule
from rollplex.passes.solver import Family, Objective, Solution, constrain, minimise
from rollplex.passes.state import HeldSizes, Lifetimes, SizeChoice
from rollplex.passes.update_sizes import (
    ALIGN,
    chunk_bytes_per_element,
    resident_bytes,
    workspace_name,
)
from rollplex.passes.work import updated_parameters

LAUNCH_US = 300
Results = tuple[SolverResult, ...]


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


class Model:
    """The variables of the docstring; `FAMILIES` are its constraints."""

    def __init__(self, data: Data) -> None:
        self.data, self.cp = data, cp_model.CpModel()
        unit_us = -(-ALIGN * data.ps_per_element * data.units // 10**6)
        longest, most = unit_us + LAUNCH_US + 1, min(MOST_PIECES, data.units)
        whole = (data.in_flight * data.element_bytes + data.updating_bytes) * data.units * ALIGN
        whole += max(data.beside.values(), default=0)
        worst = {
            w: max(0, whole + max(data.suffix_bytes(c, w) for c in data.choices) - r) for w, r in data.room.items()
        }
        self.count = self.cp.new_int_var(1, most, "K")
        self.units = self.cp.new_int_var(1, data.units, "E")
        self.product = self.cp.new_int_var(0, most * data.units, "KE")
        self.beside = self.cp.new_int_var(0, max(data.beside.values(), default=0), "G")
        self.flying = self.cp.new_int_var(1, most * data.units, "F")
        self.step = {c.responses: self.cp.new_bool_var(f"x[{c.responses}]") for c in data.choices}
        self.over = {w: self.cp.new_int_var(0, most, f"over[{w}]") for w, most in worst.items()}
        self.chunk_us = self.cp.new_int_var(0, longest, "c")
        self.update_us = self.cp.new_int_var(0, (most + data.in_flight) * longest, "T")

    def workspace(self) -> cp_model.LinearExpr:
        """F B + E A, in bytes of one parameter of each unit."""
        sizes = [self.data.element_bytes, self.data.updating_bytes]
        return cp_model.LinearExpr.weighted_sum([self.flying, self.units], sizes)

    def objectives(self) -> list[Objective]:
        """In order."""
        data = self.data
        steps = sum(data.group // m * x for m, x in self.step.items())
        sized = data.element_bytes or data.updating_bytes  # else it is a page, whatever is chosen
        return [
            Objective("bytes over capacity", sum(self.over.values())),
            Objective("suffix steps a group", steps),
            Objective("update seconds", self.update_us, 1e-6),
            *([Objective("optimizer workspace bytes", self.workspace(), ALIGN)] if sized else []),
        ]


# ---- constraint families


def product(m: Model) -> None:
    """(1)."""
    m.cp.add_multiplication_equality(m.product, [m.count, m.units])


def cover(m: Model) -> None:
    """(2)."""
    m.cp.add(m.product >= m.data.units)


def none_empty(m: Model) -> None:
    """(3)."""
    m.cp.add(m.product - m.units < m.data.units)


def wanted_count(m: Model) -> None:
    """(4)."""
    if m.data.wanted is not None:
        m.cp.add(m.count == m.data.wanted)
    if m.data.held is not None:
        m.cp.add(m.units == -(-m.data.held // ALIGN))


def in_flight(m: Model) -> None:
    """(5)."""
    m.cp.add_min_equality(m.flying, [m.data.in_flight * m.units, m.product])


def one_step(m: Model) -> None:
    """(6)."""
    m.cp.add_exactly_one(m.step.values())


def room(m: Model) -> None:
    """(7)."""
    data = m.data
    in_flight = ALIGN * m.workspace() + m.beside
    for w, room in data.room.items():
        suffix = sum(data.suffix_bytes(c, w) * m.step[c.responses] for c in data.choices)
        m.cp.add(suffix + (in_flight if w == data.update_window else 0) <= room + m.over[w])


def chunk_time(m: Model) -> None:
    """(8), rounded up to microseconds."""
    m.cp.add(m.chunk_us * 10**6 >= m.units * (ALIGN * m.data.ps_per_element) + LAUNCH_US * 10**6)


def update_time(m: Model) -> None:
    """(9)."""
    m.cp.add_multiplication_equality(m.update_us, [m.chunk_us, m.count + (m.data.in_flight - 1)])


def snapshot_and_gradients(m: Model) -> None:
    """(10)."""
    if m.data.beside:
        m.cp.add_allowed_assignments([m.units, m.beside], list(m.data.beside.items()))


FAMILIES: tuple[Family[Model], ...] = (
    Family(1, "parameters that the chunks take", product),
    Family(2, "chunks cover the parameters", cover),
    Family(3, "no chunk is empty", none_empty),
    Family(4, "the number of chunks that is stated, the size that is held", wanted_count),
    Family(5, "chunks in flight", in_flight),
    Family(6, "one size of suffix step", one_step),
    Family(7, "room for what is alive together", room),
    Family(8, "time of a chunk", chunk_time),
    Family(9, "time of the update", update_time),
    Family(10, "what is there of a snapshot that is made again, and left of gradients", snapshot_and_gradients),
)


# ---- the pass


def read(job: Job, model: Model, solution: Solution) -> Chunks:
    """The policy's sizes as a summary and as bytes of the scalable objects."""
    chosen = next(c for c in model.data.choices if solution.true(model.step[c.responses]))
    optimizer = _optimizer(job, model, solution)
    sizes = {**chosen.nbytes, workspace_name(job, job.policy): optimizer.workspace_bytes}
    return Chunks(ChunkSummary(optimizer=optimizer, microbatch=_microbatch(chosen)), sizes, solution.results)


def _optimizer(job: Job, model: Model, solution: Solution) -> OptimizerChunks:
    data = model.data
    elements = min(solution.value(model.units) * ALIGN, data.parameters)
    return OptimizerChunks(
        count=-(-data.parameters // elements),
        elements=elements,
        bytes=elements * chunk_bytes_per_element(job),
        workspace_bytes=data.workspace_bytes(elements),
    )


def _microbatch(chosen: SizeChoice) -> Microbatches:
    return Microbatches(prefix_prompts=1, suffix_responses=chosen.responses, workspace_bytes=dict(chosen.nbytes))


def with_update(job: Job, chunks: Chunks, role: str, optimizer: OptimizerChunks, results: Results = ()) -> Chunks:
    """The sizes with those of another role's update, its objectives under its name."""
    summary = chunks.summary.model_copy(update={"others": {**chunks.summary.others, role: optimizer}})
    workspace = {workspace_name(job, role): optimizer.workspace_bytes} if optimizer.workspace_bytes else {}
    own = tuple(
        r.model_copy(update={"objective": f"{role} {r.objective}"}) for r in results if "suffix" not in r.objective
    )
    return Chunks(summary, {**chunks.nbytes, **workspace}, (*chunks.solvers, *own))


def largest(module: Module) -> SizeChoice:
    """The most responses a step beside a resident optimizer: (7) alone decides; the smallest where none fits."""
    if module[Schedule].kind == "naive":
        return module[Lifetimes].choices[0]  # activations of one at a time are resident (paper, Table 1)
    data = gather(module)
    fit = (c for c in data.choices if all(data.suffix_bytes(c, w) <= room for w, room in data.room.items()))
    return max(fit, key=lambda c: c.responses, default=data.choices[0])


def whole_update(job: Job, chosen: SizeChoice, others: tuple[str, ...]) -> Chunks:
    """One chunk a role over resident state: what the schedule without a chunked optimizer does."""

    def whole(role: str) -> OptimizerChunks:
        parameters = updated_parameters(job, role)
        nbytes, workspace = parameters * chunk_bytes_per_element(job), resident_bytes(job, role, parameters)
        return OptimizerChunks(count=1, elements=parameters, bytes=nbytes, workspace_bytes=workspace)

    summary = ChunkSummary(optimizer=whole(job.policy), microbatch=_microbatch(chosen))
    n = float(job.group // chosen.responses)
    told = SolverResult(name="chunk-sizes", status="optimal", objective="suffix steps a group", value=n, bound=n)
    chunks = Chunks(summary, dict(chosen.nbytes), () if job.schedule == "naive" else (told,))
    for role in others:
        chunks = with_update(job, chunks, role, whole(role))
    return chunks


@dataclass(frozen=True)
class ChunkSizesPass:
    """Solve optimizer chunks and responses a suffix step from the room that residency leaves (CP-SAT).

    Job keys: `optimizer.chunks`, `optimizer.in_flight`, `workload.group`, `solver`.
    """

    name: ClassVar[str] = "chunk-sizes"
    needs: ClassVar[tuple[type, ...]] = (Schedule, HeldSizes, Lifetimes, Residency)
    makes: ClassVar[type] = Chunks

    def run(self, module: Module) -> Module:
        """Solve; see the module's docstring."""
        job = module.job
        others = tuple(r for r in module[Schedule].trained if r != job.policy)
        if workspace_name(job, job.policy) not in module[Lifetimes]:
            return module.put(whole_update(job, largest(module), others))
        data = gather(module)
        chunks = read(job, *self._solve(job, data))
        chosen = next(c for c in data.choices if c.responses == chunks.summary.microbatch.suffix_responses)
        for role in others:
            model, solution = self._solve(job, gather_update(module, role, chosen))
            chunks = with_update(job, chunks, role, _optimizer(job, model, solution), solution.results)
        return module.put(chunks)

    def _solve(self, job: Job, data: Data) -> tuple[Model, Solution]:
        model = constrain(Model(data), FAMILIES)
        solution = minimise(model.cp, self.name, model.objectives(), seconds=job.solver.seconds, seed=job.solver.seed)
        assert solution is not None, "over[w] makes every job solvable"
        return model, solution
