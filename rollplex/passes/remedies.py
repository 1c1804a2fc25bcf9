"""What would make an infeasible job fit: changes to the job, each verified by compiling it again with the change."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rollplex.ir.errors import RollplexError
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan, Remedy

Recompile = Callable[[Job], Plan]
KEEP = 5


def candidates(job: Job) -> Iterator[tuple[str, dict]]:
    """Single changes worth trying, as (text, new top-level sections)."""
    if job.schedule in ("naive", "disaggregated"):
        yield "schedule=rollplex", {"schedule": "rollplex"}
    if job.schedule != "serial":
        yield "schedule=serial", {"schedule": "serial"}
    if job.ablate:
        yield "ablate=[]", {"ablate": ()}
    yield from _role_changes(job)
    for factor in (2, 4):
        prompts = job.workload.prompts // factor
        if prompts:
            workload = job.workload.model_copy(update={"prompts": prompts})
            yield f"workload.prompts={prompts}", {"workload": workload}
    tokens = job.workload.prompt_tokens // 2
    if tokens >= 2:
        yield (
            f"workload.prompt_tokens={tokens}",
            {"workload": job.workload.model_copy(update={"prompt_tokens": tokens})},
        )


def _role_changes(job: Job) -> Iterator[tuple[str, dict]]:
    policy = job.roles[job.policy]
    assert policy.train
    assert policy.rollout
    name = job.policy
    if policy.recompute != "full":
        yield f"roles.{name}.recompute=full", _role(job, policy.model_copy(update={"recompute": "full"}))
    if policy.prefix_saved != "auto":
        yield f"roles.{name}.prefix_saved=auto", _role(job, policy.model_copy(update={"prefix_saved": "auto"}))
    if job.rollout_kv_need_bytes < policy.rollout.kv_cache_bytes:
        gib = round(job.rollout_kv_need_bytes / 2**30 + 0.05, 1)
        rollout = policy.rollout.model_copy(update={"kv_cache_gib": gib})
        yield f"roles.{name}.rollout.kv_cache_gib={gib}", _role(job, policy.model_copy(update={"rollout": rollout}))
    wider = 2 * policy.train.tensor_parallel
    if wider in job.spec.legal_tp() and wider <= job.cluster.gpus_per_node:
        train = policy.train.model_copy(update={"tensor_parallel": wider})
        yield f"roles.{name}.train.tensor_parallel={wider}", _role(job, policy.model_copy(update={"train": train}))


def _role(job: Job, changed: object) -> dict:
    return {"roles": {**job.roles, job.policy: changed}}


def with_remedies(plan: Plan, job: Job, recompile: Recompile) -> Plan:
    """The plan with the changes that make it fit, cheapest predicted step first."""
    assert plan.infeasible is not None
    found: list[Remedy] = []
    for text, update in candidates(job):
        try:
            other = recompile(Job.model_validate({**job.model_dump(), **_dump(update)}))
        except (RollplexError, ValueError):
            continue  # the change makes no legal job
        if other.feasible:
            freed = plan.summary.peak_hbm_bytes - other.summary.peak_hbm_bytes
            costs = other.summary.times.step_s - plan.summary.times.step_s
            found.append(Remedy(change=text, frees_bytes=freed, costs_s=round(costs, 3)))
    ranked = tuple(sorted(found, key=lambda r: (r.costs_s, r.change))[:KEEP])
    return plan.model_copy(update={"infeasible": plan.infeasible.model_copy(update={"remedies": ranked})})


def _dump(update: dict) -> dict:
    dumped = {}
    for key, value in update.items():
        if isinstance(value, dict):
            dumped[key] = {k: v.model_dump() for k, v in value.items()}
        else:
            dumped[key] = value.model_dump() if hasattr(value, "model_dump") else value
    return dumped
