"""The facts behind a plan file, made again from the file alone: its job and its graph are all that the passes need.

rebuild(read_plan("plan.json"))[Lifetimes]     the state contract with what the plan does not keep: uses, legal places
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from rollplex.ir.dsl import Algorithm
from rollplex.ir.job import Job
from rollplex.ir.module import Module
from rollplex.ir.plan import Plan
from rollplex.ir.planned_job import job_of
from rollplex.ir.records import to_graph
from rollplex.passes.base import Pass
from rollplex.passes.layout import Layout
from rollplex.passes.pipeline import default_pipeline, run_passes
from rollplex.passes.schedule import Schedule
from rollplex.passes.state import Lifetimes


def rebuild(plan: Plan, job: Job | None = None, like: Module | None = None) -> Module:
    """The module of a plan as far as its state contract; under another job and with another's layout if given."""
    file, _, name = plan.algorithm.partition(":")
    algorithm = Algorithm(_not_kept, name, file, 0, "", {}, ())
    module, passes = Module(to_graph(plan.graph), job or job_of(plan), algorithm), _passes()
    if like is not None:
        module, passes = module.put(like[Layout]), tuple(p for p in passes if p.makes is not Layout)
    return run_passes(module, passes)


def _not_kept(*_: object) -> NoReturn:
    raise AssertionError("a plan keeps the graph of an algorithm, not its function")


def _passes() -> tuple[Pass, ...]:
    """From the schedule, which comes first after the split, to the state contract."""
    pipeline = default_pipeline()
    first, last = (next(i for i, p in enumerate(pipeline) if p.makes is fact) for fact in (Schedule, Lifetimes))
    return pipeline[first : last + 1]


def as_planned(plan: Plan, module: Module) -> Module:
    """The module with the sizes that the plan's later passes chose: workspaces are larger where there was room."""
    sizes = {o.name: o.bytes for o in plan.summary.objects}
    found = module[Lifetimes]
    objects = tuple(replace(o, nbytes=sizes.get(o.name, o.nbytes)) for o in found.objects)
    return module.put(replace(found, objects=objects))
