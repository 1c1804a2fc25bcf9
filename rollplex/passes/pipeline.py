"""The default pipeline: passes in order, each timed, the graph verified after each; then a plan, checked.

infer-types  prefix-split  share-prefix  schedule      layout    hold-sizes
lifetimes    residency     chunk-sizes   host-pool     share-policy  estimate  lower
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rollplex.ir import graph as g
from rollplex.ir.checker import verify_plan
from rollplex.ir.dsl import Algorithm
from rollplex.ir.job import Job
from rollplex.ir.job_schema import Role
from rollplex.ir.module import Module
from rollplex.ir.plan import Plan
from rollplex.ir.stopwatch import stage
from rollplex.ir.types import RoleKind
from rollplex.passes.ablation import HoldSizes
from rollplex.passes.assemble import NEEDS, build_plan
from rollplex.passes.base import Pass
from rollplex.passes.candidates import NO_CHOICE, Degrees
from rollplex.passes.chunk_sizes import ChunkSizesPass
from rollplex.passes.estimate import EstimatePass
from rollplex.passes.heads import with_heads
from rollplex.passes.host_pool import HostPoolPass
from rollplex.passes.infer_types import InferTypes
from rollplex.passes.installed import insert, installed_passes
from rollplex.passes.layout import Layout, LayoutPass
from rollplex.passes.lifetimes import LifetimesPass
from rollplex.passes.lower import LowerPass
from rollplex.passes.prefix_split import PrefixSplit
from rollplex.passes.remedies import with_remedies
from rollplex.passes.residency import Residency, ResidencyPass
from rollplex.passes.schedule import Schedule, SchedulePass
from rollplex.passes.selection import check_needs
from rollplex.passes.share_policy import SharePolicyPass
from rollplex.passes.share_prefix import SharePrefix
from rollplex.passes.state import Lifetimes
from rollplex.passes.with_group import cheaper


@dataclass(frozen=True)
class PassReport:
    """What one pass did: the fact it made, the module after it, and the seconds it took."""

    name: str
    makes: type
    module: Module
    seconds: float


OnPass = Callable[[PassReport], None]


def default_pipeline() -> tuple[Pass, ...]:
    """The passes of design order; layout comes before lifetimes, which counts its case-3 buffer."""
    return (
        InferTypes(),
        PrefixSplit(),
        SharePrefix(),
        SchedulePass(),
        LayoutPass(),
        HoldSizes(),
        LifetimesPass(),
        ResidencyPass(),
        ChunkSizesPass(),
        HostPoolPass(),
        SharePolicyPass(),
        EstimatePass(),
        LowerPass(),
    )


def full_pipeline() -> tuple[Pass, ...]:
    """The default pipeline with the passes of installed packages where they belong."""
    return insert(default_pipeline(), installed_passes())


def start(algorithm: Algorithm, job: Job) -> Module:
    """Trace the algorithm under the job's parameters and roles."""
    params = dict(job.algorithm)
    if "n" in algorithm.parameters:
        params.setdefault("n", job.group)
    if "turns" in algorithm.parameters and job.workload.turns:
        params.setdefault("turns", job.workload.turns.count)
    with stage("trace"):
        graph = algorithm.trace(params, {name: _kind(role) for name, role in job.roles.items()})
    return Module(graph, with_heads(graph, job), algorithm).put(NO_CHOICE)


def _kind(role: Role) -> RoleKind:
    if role.train is None:
        return "frozen"
    return "policy" if role.rollout else "critic"


def run_passes(module: Module, passes: Sequence[Pass], on_pass: OnPass | None = None) -> Module:
    """Run passes in order; the graph is verified after each."""
    for p in passes:
        began = time.perf_counter()
        with stage(p.name):
            module = p.run(module)
            g.verify(module.graph)
        if on_pass:
            on_pass(PassReport(p.name, p.makes, module, time.perf_counter() - began))
    return module


@dataclass(frozen=True)
class Recompiler:
    """The pipeline for jobs that differ from the one at hand, as remedies and questions about a plan need it.

    A trial as far as the state contract takes over what an earlier job has made: the split graph where the algorithm
    is traced alike, the layout where the degrees are the same. A plan takes over nothing.
    """

    algorithm: Algorithm
    passes: tuple[Pass, ...]
    graphs: list[tuple[object, Module]] = field(default_factory=list)
    layouts: list[tuple[object, Layout]] = field(default_factory=list)

    def lifetimes(self, job: Job) -> Module:
        """The module as far as its state contract."""
        module, passes = self._split(job), self._between(Schedule, Lifetimes)
        degrees = _degrees(job)
        if known := next((layout for key, layout in self.layouts if key == degrees), None):
            return run_passes(module.put(known), [p for p in passes if p.makes is not Layout])
        module = run_passes(module, passes)
        self.layouts.append((degrees, module[Layout]))
        return module

    def _split(self, job: Job) -> Module:
        """The module as the schedule finds it; nothing before that asks how large anything is."""
        key = (job.algorithm, job.group, [(name, _kind(r), job.whole_sequences(name)) for name, r in job.roles.items()])
        if known := next((module for traced, module in self.graphs if traced == key), None):
            return replace(known, job=with_heads(known.graph, job))
        module = run_passes(start(self.algorithm, job), self.passes[: self._place(Schedule)])
        self.graphs.append((key, module))
        return module

    def plan(self, job: Job) -> Plan | None:
        """The whole plan without remedies, feasible or not; None as soon as residency finds no room."""
        placed = self._place(Residency) + 1
        module = run_passes(start(self.algorithm, job), self.passes[:placed])
        if not module[Residency].fits:
            return None
        return build_plan(cheaper(run_passes(module, self.passes[placed:]), job, self._run))

    def _run(self, job: Job) -> Module:
        return run_passes(start(self.algorithm, job), self.passes)

    def check(self, plan: Plan) -> None:
        """PlanError for a plan that the checker refuses."""
        verify_plan(plan)

    def _between(self, first: type, last: type) -> tuple[Pass, ...]:
        return self.passes[self._place(first) : self._place(last) + 1]

    def _place(self, fact: type) -> int:
        """Where the pass stands that makes a fact."""
        return next(i for i, p in enumerate(self.passes) if p.makes is fact)


def _degrees(job: Job) -> tuple[object, ...]:
    """What decides how weights lie, but for how much work decodes through them."""
    policy = job.roles[job.policy]
    return (job.model, job.layout, job.shares_weights, policy.train, policy.rollout and policy.rollout.tensor_parallel)


def compile_plan(
    algorithm: Algorithm,
    job: Job,
    degrees: Degrees = NO_CHOICE,
    *,
    on_pass: OnPass | None = None,
    passes: Sequence[Pass] | None = None,
) -> Plan:
    """Compile an algorithm under a job; the plan has been through the checker, feasible or not.

    `degrees` says how the job was chosen, where its file left that to the compiler (see `passes.degrees`).
    `passes` are the full pipeline with those of installed packages unless given. Raises GraphError for the
    algorithm's mistakes, PassError and SolverTimeout when a pass cannot go on, PluginError for a package's mistakes.
    """
    chosen = full_pipeline() if passes is None else passes
    check_needs(chosen, chosen, NEEDS)
    others: list[PassReport] = []

    def run(changed: Job) -> Module:
        return run_passes(start(algorithm, changed).put(degrees), chosen, others.append)

    first = run_passes(start(algorithm, job).put(degrees), chosen, on_pass)
    module = cheaper(first, job, run)
    if on_pass and module is not first:
        for report in others:  # told last is what the plan is made of
            on_pass(report)
    with stage("assemble the plan"):
        plan = build_plan(module)
    if not plan.feasible:
        with stage("remedies"):
            plan = with_remedies(plan, job, Recompiler(algorithm, tuple(chosen)))
    with stage("check the plan"):
        verify_plan(plan)
    return plan
