"""Rollplex from Python: what each command does, without a terminal.

    done = compile_files("examples/grpo.py", "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", ["schedule=naive"])
    done.plan.feasible          False
    run(done.plan, hosts=hosts.find(done.plan, done.algorithm), out_dir=Path("runs/a"))

torch and OR-Tools are imported by the functions that need them, so that the others answer at once.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollplex.hosts import HostFunction
from rollplex.ir.errors import PlanError, PluginError, Problem, RunError
from rollplex.ir.models import ModelSpec, load_model, model_names
from rollplex.ir.plan import Plan, read_plan
from rollplex.ir.planned_job import job_of
from rollplex.ir.plugins import DISABLE, GROUPS, Plugin, declared, disabled
from rollplex.ir.stopwatch import stage

if TYPE_CHECKING:
    from rollplex.ir.calibration import Calibration
    from rollplex.ir.dsl import Algorithm
    from rollplex.ir.explanation import Explanation
    from rollplex.ir.job_auto import JobSet
    from rollplex.passes.base import Pass
    from rollplex.passes.pipeline import OnPass, PassReport
    from rollplex.runtime.calibrate.grid import Grid
    from rollplex.runtime.calibrate.measure import Tell
    from rollplex.runtime.events import Progress
    from rollplex.runtime.run import RunResult


@dataclass(frozen=True)
class Compiled:
    """A plan and the algorithm it was compiled from; None for a plan that was read from a file."""

    plan: Plan
    algorithm: Algorithm | None


# ---- compile


def compile_files(
    algorithm: str, job: str | Path, overrides: Sequence[str] = (), on_pass: OnPass | None = None, passes: str = ""
) -> Compiled:
    """Compile an algorithm under a job file with `a.b=c` overrides; infeasible is a result, not an error.

    The algorithm is FILE.py, FILE.py:NAME, or the NAME of one that an installed package has; `passes` is what
    `--passes` says, empty for all of them. Raises RollplexError for whatever is wrong with the input.
    """
    loaded, jobs = _load(algorithm, job, overrides)
    from rollplex.passes.degrees import compile_best

    return Compiled(compile_best(loaded, jobs, on_pass=on_pass, passes=_selected(passes)), loaded)


def run_passes(
    algorithm: str, job: str | Path, overrides: Sequence[str] = (), on_pass: OnPass | None = None, passes: str = ""
) -> None:
    """Run some passes for what they report to `on_pass`; no plan comes of it, so none of its facts need be there."""
    loaded, jobs = _load(algorithm, job, overrides)
    from rollplex.passes import pipeline
    from rollplex.passes.selection import check_needs

    chosen = _selected(passes)
    check_needs(chosen, pipeline.full_pipeline())
    pipeline.run_passes(pipeline.start(loaded, jobs.only(str(job))), chosen, on_pass)


def _load(algorithm: str, job: str | Path, overrides: Sequence[str]) -> tuple[Algorithm, JobSet]:
    """The jobs first: their mistakes show before torch is imported."""
    with stage("read the job"):
        from rollplex.ir.job_auto import load_jobs

        jobs = load_jobs(job, overrides)
    with stage("import torch and OR-Tools"):
        import rollplex.passes.pipeline  # noqa: F401  (measured here, used by the callers)
        from rollplex.ir.loading import find_algorithm
    with stage("load the algorithm"):
        return find_algorithm(algorithm), jobs


def _selected(passes: str) -> tuple[Pass, ...]:
    from rollplex.passes.pipeline import full_pipeline
    from rollplex.passes.selection import select

    return select(full_pipeline(), passes)


def ends_early(passes: str) -> bool:
    """Whether a `--passes` text names passes to run, so that no plan is meant to come of it."""
    return any(not term.strip().startswith("-") for term in passes.split(",") if term.strip())


@dataclass(frozen=True)
class PassRow:
    """A pass: its name, the fact it makes, the sentence that says what it does, and the package it came with."""

    name: str
    makes: str
    does: str
    package: str = ""


def pass_rows() -> tuple[PassRow, ...]:
    """The pipeline in order, with the passes of installed packages."""
    from rollplex.passes.pipeline import full_pipeline

    return tuple(_row(p) for p in full_pipeline())


def _row(p: Pass) -> PassRow:
    from rollplex.passes.installed import InstalledPass

    package = p.plugin.distribution if isinstance(p, InstalledPass) else ""
    documented = p.inner if isinstance(p, InstalledPass) else p
    does = inspect.cleandoc(documented.__doc__ or "").partition("\n\n")[0]
    return PassRow(p.name, p.makes.__name__, " ".join(does.split()), package)


def check_pass_names(names: Iterable[str], passes: str = "") -> None:
    """PassError for names of `--print-after` that are none of the passes that run, each with the nearest that is."""
    from rollplex.passes.selection import check_names

    check_names(names, [p.name for p in _selected(passes)], "--print-after")


def describe_pass(report: PassReport) -> str:
    """The module after a pass: the graph as a program, and the fact that the pass made."""
    from rollplex.ir.printer import print_graph

    return f"{print_graph(report.module.graph)}\n{report.makes.__name__}\n{report.module[report.makes]}\n"


@dataclass(frozen=True)
class PluginRow:
    """An entry point of an installed package: where it stands, and why it is of no use, if so."""

    group: str
    name: str
    package: str
    problem: str


def plugin_rows() -> tuple[PluginRow, ...]:
    """Every entry point of the groups that are read; each is loaded to see whether it can be."""
    return tuple(
        PluginRow(p.group, p.name, f"{p.distribution} {p.version}", _trouble(p)) for g in GROUPS for p in declared(g)
    )


def _trouble(plugin: Plugin) -> str:
    if disabled(plugin):
        return f"switched off by {DISABLE}"
    try:
        plugin.load()
    except PluginError as error:
        return error.problems[0].what
    return ""


# ---- plans


def load_plan(path: str | Path) -> Plan:
    """The plan in a file, its form and the form of its job checked; PlanError reports every problem."""
    plan = read_plan(path)
    job_of(plan)
    return plan


def violations(plan: Plan) -> tuple[Problem, ...]:
    """What the checker refuses in a plan; nothing for a sound one."""
    from rollplex.ir.checker import verify_plan

    try:
        verify_plan(plan)
    except PlanError as refused:
        return refused.problems
    return ()


def explain(plan: Plan, name: str) -> Explanation:
    """Why an object is where it is, from the plan alone; PlanError names the nearest objects for an unknown name."""
    from rollplex.passes.explaining import explain_object

    known = {o.name: o for o in plan.summary.objects} | {o.title: o for o in plan.summary.objects}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        near = list(dict.fromkeys(known[n].name for n in close)) or [o.name for o in plan.summary.objects]
        raise PlanError(f"no object `{name}`", where=plan.algorithm, hint=" or ".join(near))
    return explain_object(plan, known[name].name)


def rule_count() -> int:
    """How many rules the checker knows."""
    from rollplex.ir.checker import RULES

    return len(RULES)


# ---- calibrate


def calibrate(
    job: str | Path,
    overrides: Sequence[str],
    out: Path,
    *,
    seconds: float | None = None,
    quick: bool = False,
    tell: Tell,
    begin: Callable[[Grid], None],
) -> Calibration:
    """Measure this machine's GPUs for a job and write the file that its `cluster.calibration` names.

    What the job says of an earlier calibration, and of sharing that needs one, is left aside. Raises RollplexError.
    """
    from rollplex.ir.job_auto import load_jobs
    from rollplex.runtime.calibrate.command import calibrate as measure
    from rollplex.runtime.calibrate.grid import SECONDS

    aside = ("cluster.calibration=null", "sharing={kind: mps}")
    loaded = load_jobs(job, [*overrides, *aside]).only(str(job))
    return measure(loaded, out, SECONDS if seconds is None else seconds, quick, tell, begin)


# ---- tables


def models() -> tuple[ModelSpec, ...]:
    """The built-in registry, in the order of names."""
    return tuple(load_model(name) for name in model_names())


# ---- run


def run(
    plan: Plan,
    *,
    hosts: Mapping[str, HostFunction],
    out_dir: Path,
    progress: Progress | None = None,
    resume: bool = False,
) -> RunResult:
    """Execute a plan in engine processes on this machine; see `rollplex.runtime.run.run_plan`."""
    from rollplex.runtime.events import silent
    from rollplex.runtime.run import run_plan

    return run_plan(plan, hosts=hosts, out_dir=out_dir, progress=progress or silent, resume=resume)


def with_steps(plan: Plan, steps: int) -> Plan:
    """The plan, to be run for another number of iterations."""
    if steps < 1:
        raise RunError(f"{steps} steps", where="--steps", hint="at least 1")
    return plan.model_copy(update={"job": {**plan.job, "run": {**(plan.job.get("run") or {}), "steps": steps}}})
