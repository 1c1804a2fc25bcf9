"""Choose the parallel degrees that a job leaves to the compiler (`auto`): compile every legal choice, keep the best.

degrees    actor train TP8, actor rollout TP4: the best of 20 legal choices, 9 of them fit
           next  actor train TP8, actor rollout TP8    step 171 s   peak 69.26 GiB

A choice is refused unseen where the weights of one rollout rank alone, which every schedule holds, exceed a GPU.
Best is the least predicted step, then the lower peak, then the smaller degrees. Where nothing fits, best is the
compiled choice that lacks least, and the plan explains that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollplex.ir.dsl import Algorithm
from rollplex.ir.errors import PassError, RollplexError, SolverTimeout
from rollplex.ir.job import Job
from rollplex.ir.job_auto import JobSet
from rollplex.ir.module import Module
from rollplex.ir.plan import Candidate, Plan, Resource, Summary
from rollplex.ir.sizes import pretty
from rollplex.ir.stopwatch import stage
from rollplex.passes.assemble import explain, summarise
from rollplex.passes.base import Pass
from rollplex.passes.candidates import Degrees
from rollplex.passes.heads import with_heads
from rollplex.passes.pipeline import OnPass, compile_plan, full_pipeline, run_passes, start
from rollplex.passes.with_group import cheaper


@dataclass(frozen=True)
class Tried:
    """A choice, its job, how it compares, and the bytes that it lacks in its fullest window."""

    job: Job
    candidate: Candidate
    lacks: int = 0
    error: RollplexError | None = None

    def rank(self) -> tuple[int, float, int, tuple[int, ...]]:
        """Least first: those that fit by step and peak, then by what they lack, the unseen and the refused last."""
        c, degrees = self.candidate, tuple(self.candidate.degrees.values())
        if c.feasible:
            return 0, c.step_s or 0.0, c.peak_bytes, degrees
        return 3 if self.error else 1 if c.compiled else 2, float(self.lacks), c.peak_bytes, degrees


def compile_best(
    algorithm: Algorithm, jobs: JobSet, *, on_pass: OnPass | None = None, passes: Sequence[Pass] | None = None
) -> Plan:
    """The plan of the best job of a set, with the others as its runners-up; see `pipeline.compile_plan`."""
    chosen = full_pipeline() if passes is None else passes
    if not jobs.keys:
        return compile_plan(algorithm, jobs.jobs[0], on_pass=on_pass, passes=chosen)
    with stage("choose degrees"):
        job, degrees = choose(algorithm, jobs, chosen)
    return compile_plan(algorithm, job, degrees, on_pass=on_pass, passes=chosen)


def choose(algorithm: Algorithm, jobs: JobSet, passes: Sequence[Pass]) -> tuple[Job, Degrees]:
    """The best job of a set, and the comparison; raises what every choice raises when none can be compiled."""
    traced = start(algorithm, jobs.jobs[0])  # the graph is the same for all degrees
    named = ((job, dict(zip(jobs.keys, d, strict=True))) for job, d in zip(jobs.jobs, jobs.degrees, strict=True))
    ranked = sorted((attempt(traced, job, degrees, passes) for job, degrees in named), key=Tried.rank)
    best = ranked[0]
    if best.error is not None:
        raise best.error
    return best.job, Degrees(best.candidate.degrees, tuple(t.candidate for t in ranked[1:]))


def attempt(traced: Module, job: Job, degrees: dict[str, int], passes: Sequence[Pass]) -> Tried:
    """How one choice does; a pass that refuses it (chunks that cannot be made, say) makes it no choice."""
    if (least := rollout_weights(job)) > job.capacity_bytes:
        why = f"weights alone: {pretty(least)} of a GPU's {pretty(job.capacity_bytes)}"
        refused = Candidate(degrees=degrees, feasible=False, compiled=False, peak_bytes=least, why_not=why)
        return Tried(job, refused, least - job.capacity_bytes)
    try:
        module = cheaper(_compiled(traced, job, passes), job, lambda changed: _compiled(traced, changed, passes))
        summary = summarise(module)
    except (PassError, SolverTimeout) as error:
        why = error.problems[0].what
        refused = Candidate(degrees=degrees, feasible=False, compiled=False, peak_bytes=0, why_not=why)
        return Tried(job, refused, error=error)
    return Tried(job, _compared(job, summary, degrees), lacking(summary))


def _compiled(traced: Module, job: Job, passes: Sequence[Pass]) -> Module:
    return run_passes(replace(traced, job=with_heads(traced.graph, job)), passes)


def rollout_weights(job: Job) -> int:
    """Bytes of the language model on one rollout rank: no schedule decodes without them."""
    return job.spec.rank_parameters(job.rollout_tp, "language") * job.itemsize


def lacking(summary: Summary) -> int:
    """Bytes over a capacity in the window that exceeds it most."""
    over_hbm = summary.peak_hbm_bytes - summary.capacity_bytes
    over_node = summary.node.total_bytes - summary.node.capacity_bytes
    return max(0, over_hbm, summary.peak_host_bytes - summary.host_capacity_bytes, over_node)


_OF: dict[Resource, str] = {"hbm": "", "host": " of pinned memory", "node": " of a node's host memory"}


def _compared(job: Job, summary: Summary, degrees: dict[str, int]) -> Candidate:
    found = explain(job, summary)
    place = _OF[found.resource] if found else ""
    return Candidate(
        degrees=degrees,
        feasible=found is None,
        step_s=summary.times.step_s,
        peak_bytes=summary.peak_hbm_bytes,
        why_not=f"{pretty(found.shortfall_bytes)}{place} over in {found.window}" if found else "",
    )
