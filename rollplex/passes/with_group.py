"""Whether prefixes run with their groups, where `prefix_saved: auto` leaves that to the compiler: both ways compiled.

32 B, serial, recompute none    no room for what 32 prefixes save: dropped, made again    step 229.6 s
                                prefixes with their groups, one saved state in HBM         step 217.1 s    this one

The other way is compiled where the plan does not fit, or where what a prefix saves leaves HBM and the windows alone
say that a step may be faster: a prefix that waits for its group runs beside no decode, and that costs more than it
saves wherever decode would hide it. An ablation asks what one mechanism is worth, so there nothing makes up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rollplex.ir.errors import JobError, PassError, SolverTimeout
from rollplex.ir.job import Job
from rollplex.ir.job_file import change_job
from rollplex.ir.module import Module
from rollplex.passes.assemble import explain, summarise
from rollplex.passes.candidates import Grouped
from rollplex.passes.estimate import Estimate
from rollplex.passes.heads import with_heads
from rollplex.passes.layout import Layout
from rollplex.passes.residency import Residency
from rollplex.passes.schedule import Schedule, SchedulePass
from rollplex.passes.timeline import Added, window_seconds


def cheaper(module: Module, job: Job, run: Callable[[Job], Module]) -> Module:
    """The compiled module, or what `run` makes of its job with prefixes that run with their groups: the better one."""
    roles = left_open(module)
    changed = with_groups(job, roles)
    if changed is None or not may_pay(module, changed, roles):
        return module
    try:
        other = run(changed)
    except (PassError, SolverTimeout):
        return module  # nobody asked for it
    if not _fits(other):
        return module
    if not _fits(module):
        return other.put(Grouped(roles, "what it would be else does not fit"))
    less = module[Estimate].times.step_s - other[Estimate].times.step_s
    return other.put(Grouped(roles, f"a step takes {less:.3g} s less")) if less > 0 else module


def left_open(module: Module) -> tuple[str, ...]:
    """Trained roles whose calls are split, and of which the job does not say where their saved state is."""
    schedule, roles = module[Schedule], module.job.roles
    split = (r for r in module.job.trained if schedule.prefixes(r) and not schedule.call("whole", r))
    return tuple(r for r in split if roles[r].prefix_saved == "auto")


def with_groups(job: Job, roles: tuple[str, ...]) -> Job | None:
    """The job with prefixes of these roles that run with their groups; None where there is none or it may not be."""
    if not roles or job.ablate:
        return None
    try:
        return change_job(job, [f"roles.{role}.prefix_saved=group" for role in roles])
    except JobError:
        return None


def may_pay(module: Module, changed: Job, roles: tuple[str, ...]) -> bool:
    """Whether the changed job could fit where this does not, or take less time: by windows, transfers left out."""
    if not _fits(module):
        return True
    places = module[Residency].places
    away = any(p != "hbm" for name in places for p in places[name].values() if _saved_by(name, roles))
    return away and least_s(module, changed) < module[Estimate].times.step_s


def least_s(module: Module, changed: Job) -> float:
    """Seconds of a step of the changed job of which no transfer is exposed."""
    job = with_heads(module.graph, changed)
    schedule = SchedulePass().run(replace(module, job=job))[Schedule]
    line = window_seconds(job, schedule, Added.of(job, module[Layout].summary))
    before = sum(t.last_s for t in line.turns) if schedule.overlapped else line.decode_s + line.prefix_s
    return before + line.post_s


def _saved_by(name: str, roles: tuple[str, ...]) -> bool:
    return name in {f"{role}.prefix_saved" for role in roles}


def _fits(module: Module) -> bool:
    return explain(module.job, summarise(module)) is None
