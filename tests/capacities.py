"""Plans whose remedies nobody reads, and the smallest device for a plan: capacities are tried from the least upwards.

1536 KiB, short of 1124 -> 2660 KiB, fits, but keeps its gradients -> 2676 KiB, fits, gradients leave: this plan
"""

from __future__ import annotations

from collections.abc import Callable

from rollplex.ir.checker import verify_plan
from rollplex.ir.dsl import Algorithm
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan
from rollplex.passes.assemble import build_plan
from rollplex.passes.pipeline import full_pipeline, run_passes, start

TRIES = 60


def without_remedies(algorithm: Algorithm, job: Job) -> Plan:
    """The plan that `compile_plan` makes, checked, but no remedies: most of the time of one that does not fit."""
    plan = build_plan(run_passes(start(algorithm, job), full_pipeline()))
    verify_plan(plan)
    return plan


def smallest(
    algorithm: Algorithm,
    job_at: Callable[[str], Job],
    kib: int,
    wanted: Callable[[Plan], bool] = lambda plan: True,
    step: int = 16,
) -> Plan:
    """The plan at the first capacity from `kib` on where there is one and it is `wanted`; `step` is in KiB, too."""
    for _ in range(TRIES):
        job = job_at(f"{kib} KiB")
        plan = without_remedies(algorithm, job)
        if plan.infeasible is None and wanted(plan):
            return plan
        kib += max(-(-plan.infeasible.shortfall_bytes // 1024), 16) if plan.infeasible else step
    raise AssertionError(f"no capacity up to {kib} KiB has the plan that is wanted")
