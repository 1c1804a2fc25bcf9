"""Whether a role's prefix may run with its group (`prefix_saved: group`): one group at a time, from prefix to backward.

job.yaml:12: prefix_saved group has room for one group, and the 2 pipeline stages of `actor` work on several at a time
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollplex.ir.findings import Finding, KeyPath

if TYPE_CHECKING:
    from rollplex.ir.job import Job

_SAYS = "prefix_saved group"
_HINT = "prefix_saved: auto"


def group_rules(job: Job) -> Iterator[Finding]:
    """What needs a prefix before its group is trained on, or several groups at a time, goes with no such role."""
    for role in (r for r in job.roles if job.with_group(r)):
        path: KeyPath = ("roles", role, "prefix_saved")
        for what, hint, key in (*_of_role(job, role), *_of_step(job)):
            yield Finding(path, f"{_SAYS} {what}", f"{_HINT}, or {hint}" if hint else _HINT, (key,))


def _of_role(job: Job, role: str) -> Iterator[tuple[str, str, KeyPath]]:
    """(what, hint, key) of what the role itself lacks, or has too much of."""
    section = job.roles[role].train
    if section is None:
        what = f"is for what a backward needs, and `{role}` is not trained"
        yield what, "", ("roles", role)
    elif job.whole_sequences(role):
        what = f"moves a prefix, and engine {section.engine} runs every response with its prompt before it"
        yield what, "engine: megatron", ("roles", role, "train", "engine")
    elif (stages := section.pipeline_parallel) > 1:
        what = f"has room for one group, and the {stages} pipeline stages of `{role}` work on several at a time"
        yield what, "pipeline_parallel: 1", ("roles", role, "train", "pipeline_parallel")


def _of_step(job: Job) -> Iterator[tuple[str, str, KeyPath]]:
    """(what, hint, key) of schedules and rollouts that need all prefixes early, or know no fixed groups."""
    load = job.workload
    if job.schedule in ("streamed", "naive"):
        why = {
            "streamed": "runs prefixes behind decode, and schedule streamed trains on groups beside it",
            "naive": "gives room back group by group, and schedule naive keeps everything",
        }
        yield why[job.schedule], "schedule: serial", ("schedule",)
    if load.turns is not None:
        what = "has room for the boundary of one turn, and the next turn goes on from it before any group is trained on"
        yield what, "no turns", ("workload", "turns")
    if load.dynamic_sampling is not None:
        what = "takes the groups of a rank in their order, and dynamic sampling may sample any of them again"
        yield what, "no dynamic_sampling", ("workload", "dynamic_sampling")
    if (kind := load.rollout.kind) != "full":
        what = f"takes every group of a rank, and {kind} rollout the first to complete"
        yield what, "workload.rollout.kind: full", ("workload", "rollout", "kind")
