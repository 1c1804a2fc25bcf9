"""Rollplex from Python: what each command does, without a terminal.

    done = compile_files("examples/grpo.py", "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", ["schedule=naive"])
    done.plan.feasible          False
    run(done.plan, hosts=hosts.find(done.plan, done.algorithm), out_dir=Path("runs/a"))

torch and OR-Tools are imported by the functions that need them, so that the others answer at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollplex.hosts import HostFunction
from rollplex.ir.errors import PassError, PlanError, Problem, RunError
from rollplex.ir.models import ModelSpec, load_model, model_names
from rollplex.ir.plan import Plan, read_plan
from rollplex.show.header import job_of

if TYPE_CHECKING:
    from rollplex.ir.dsl import Algorithm
    from rollplex.passes.pipeline import OnPass, PassReport
    from rollplex.runtime.events import Progress
    from rollplex.runtime.run import RunResult


@dataclass(frozen=True)
class Compiled:
    """A plan and the algorithm it was compiled from; None for a plan that was read from a file."""

    plan: Plan
    algorithm: Algorithm | None


# ---- compile


def compile_files(
    algorithm: str, job: str | Path, overrides: Sequence[str] = (), on_pass: OnPass | None = None
) -> Compiled:
    """Compile FILE.py or FILE.py:NAME under a job file with `a.b=c` overrides; infeasible is a result, not an error.

    Raises RollplexError for whatever is wrong with the input.
    """
    from rollplex.ir.job import load_job

    loaded_job = load_job(job, overrides)  # the job first: its mistakes show before torch is imported
    from rollplex.ir.loading import load_algorithm
    from rollplex.passes.pipeline import compile_plan

    file, _, name = algorithm.partition(".py:")
    loaded = load_algorithm(f"{file}.py" if name else algorithm, name or None)
    return Compiled(compile_plan(loaded, loaded_job, on_pass=on_pass), loaded)


@dataclass(frozen=True)
class PassRow:
    """A pass of the default pipeline: its name, the fact it makes, and the sentence that says what it does."""

    name: str
    makes: str
    does: str


def pass_rows() -> tuple[PassRow, ...]:
    """The default pipeline in order."""
    from rollplex.passes.pipeline import default_pipeline

    return tuple(PassRow(p.name, p.makes.__name__, " ".join((p.__doc__ or "").split())) for p in default_pipeline())


def check_pass_names(names: Iterable[str]) -> None:
    """PassError for names that are no pass of the pipeline, each with the nearest one that is."""
    known = [row.name for row in pass_rows()]
    wrong = [
        Problem(f"no pass `{n}`", "--print-after", " or ".join(difflib.get_close_matches(n, known)) or ", ".join(known))
        for n in names
        if n not in known
    ]
    if wrong:
        raise PassError(*wrong)


def describe_pass(report: PassReport) -> str:
    """The module after a pass: the graph as a program, and the fact that the pass made."""
    from rollplex.ir.printer import print_graph

    made = next(row.makes for row in pass_rows() if row.name == report.name)
    fact = next((f for kind, f in report.module.facts.items() if kind.__name__ == made), None)
    return f"{print_graph(report.module.graph)}\n{made}\n{fact}\n"


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


def rule_count() -> int:
    """How many rules the checker knows."""
    from rollplex.ir.checker import RULES

    return len(RULES)


# ---- tables


def models() -> tuple[ModelSpec, ...]:
    """The built-in registry, in the order of names."""
    return tuple(load_model(name) for name in model_names())


# ---- run


def run(plan: Plan, *, hosts: Mapping[str, HostFunction], out_dir: Path, progress: Progress | None = None) -> RunResult:
    """Execute a plan in engine processes on this machine; see `rollplex.runtime.run.run_plan`."""
    from rollplex.runtime.events import silent
    from rollplex.runtime.run import run_plan

    return run_plan(plan, hosts=hosts, out_dir=out_dir, progress=progress or silent)


def with_steps(plan: Plan, steps: int) -> Plan:
    """The plan, to be run for another number of iterations."""
    if steps < 1:
        raise RunError(f"{steps} steps", where="--steps", hint="at least 1")
    return plan.model_copy(update={"job": {**plan.job, "run": {**(plan.job.get("run") or {}), "steps": steps}}})
