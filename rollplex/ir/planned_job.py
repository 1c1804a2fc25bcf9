"""The job inside a plan, held to every rule that a job file is held to: a plan stands on its own.

job_of(plan)     the Job; PlanError: job.cluster.gpu: no GPU `H800x`
accepted(plan)   the Job; None
"""

from __future__ import annotations

from pydantic import ValidationError

from rollplex.ir.errors import PlanError, Problem
from rollplex.ir.job import Job
from rollplex.ir.job_checks import check_job
from rollplex.ir.plan import Plan


def job_of(plan: Plan) -> Job:
    """The job a plan was made for; PlanError with everything that is wrong with it."""
    try:
        job = Job.model_validate(plan.job)
    except ValidationError as err:
        raise PlanError(*(Problem(e["msg"], _key(e["loc"])) for e in err.errors()[:20])) from None
    if wrong := [found.problem(_key(found.path)) for found in check_job(job)]:
        raise PlanError(*wrong)
    return job


def accepted(plan: Plan) -> Job | None:
    """The job of a plan; none where it would be refused."""
    try:
        return job_of(plan)
    except PlanError:
        return None


def _key(path: tuple[str | int, ...]) -> str:
    return ".".join(["job", *map(str, path)])
