"""The default pipeline: passes in order, each timed, the graph verified after each; then a plan, checked.

infer-types  prefix-split  share-prefix  schedule      layout    hold-sizes
lifetimes    residency     chunk-sizes   share-policy  estimate  lower
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollplex.ir import graph as g
from rollplex.ir.checker import verify_plan
from rollplex.ir.dsl import Algorithm
from rollplex.ir.job import Job
from rollplex.ir.module import Module
from rollplex.ir.plan import Plan
from rollplex.ir.stopwatch import stage
from rollplex.ir.types import RoleKind
from rollplex.passes.ablation import HoldSizes
from rollplex.passes.assemble import NEEDS, build_plan
from rollplex.passes.base import Pass
from rollplex.passes.chunk_sizes import ChunkSizesPass
from rollplex.passes.estimate import EstimatePass
from rollplex.passes.infer_types import InferTypes
from rollplex.passes.installed import insert, installed_passes
from rollplex.passes.layout import LayoutPass
from rollplex.passes.lifetimes import LifetimesPass
from rollplex.passes.lower import LowerPass
from rollplex.passes.prefix_split import PrefixSplit
from rollplex.passes.remedies import with_remedies
from rollplex.passes.residency import ResidencyPass
from rollplex.passes.schedule import SchedulePass
from rollplex.passes.selection import check_needs
from rollplex.passes.share_policy import SharePolicyPass
from rollplex.passes.share_prefix import SharePrefix


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
    roles: dict[str, RoleKind] = {name: "policy" if role.train else "frozen" for name, role in job.roles.items()}
    with stage("trace"):
        return Module(algorithm.trace(params, roles), job, algorithm)


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


def compile_plan(
    algorithm: Algorithm, job: Job, *, on_pass: OnPass | None = None, passes: Sequence[Pass] | None = None
) -> Plan:
    """Compile an algorithm under a job; the plan has been through the checker, feasible or not.

    `passes` are the full pipeline with those of installed packages unless given. Raises GraphError for the
    algorithm's mistakes, PassError and SolverTimeout when a pass cannot go on, PluginError for a package's mistakes.
    """
    chosen = full_pipeline() if passes is None else passes
    check_needs(chosen, chosen, NEEDS)
    module = run_passes(start(algorithm, job), chosen, on_pass)
    with stage("assemble the plan"):
        plan = build_plan(module)
    if not plan.feasible:
        with stage("remedies"):
            plan = with_remedies(plan, job, lambda changed: build_plan(run_passes(start(algorithm, changed), chosen)))
    with stage("check the plan"):
        verify_plan(plan)
    return plan
