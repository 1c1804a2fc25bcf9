"""Whether a job's prompt groups may be trained on while others decode: all ranks have the same ones, several of them.

job.yaml:31: schedule streamed: a rank has one prompt group, and none could be trained on while others decode
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollplex.ir.findings import Finding, KeyPath

if TYPE_CHECKING:
    from rollplex.ir.job import Job

_SCHEDULE: KeyPath = ("schedule",)
_HINT = "schedule: rollplex"


def streamed_rules(job: Job) -> Iterator[Finding]:
    """What cuts or repeats the rollout knows no order of groups; roles that are cut otherwise have other groups."""
    if job.schedule != "streamed":
        return
    load, says = job.workload, "schedule streamed"
    if load.rollout.kind != "full":
        what = f"{says} trains on groups in their order, and {load.rollout.kind} rollout takes the first to complete"
        yield Finding(_SCHEDULE, what, f"{_HINT}, or workload.rollout.kind: full", (("workload", "rollout", "kind"),))
    if load.dynamic_sampling is not None:
        what = f"{says} trains on groups as they complete, and dynamic sampling may sample any of them again"
        yield Finding(_SCHEDULE, what, f"{_HINT}, or no dynamic_sampling", (("workload", "dynamic_sampling"),))
    if load.turns is not None:
        what = f"{says} trains behind a group's last response, and the turns of all trajectories end together"
        yield Finding(_SCHEDULE, what, f"{_HINT}, or no turns", (("workload", "turns"),))
    if job.sharing.kind == "solved":
        what = f"{says} trains beside decode, and sharing solved knows of prefixes beside it alone"
        yield Finding(_SCHEDULE, what, f"{_HINT}, or sharing.kind: mps", (("sharing", "kind"),))
    yield from _groups(job)


def _groups(job: Job) -> Iterator[Finding]:
    own = job.data_parallel(job.policy)
    for name in job.roles:
        if (others := job.data_parallel(name)) != own:
            what = f"schedule streamed: `{name}` has {others} data-parallel ranks and `{job.policy}` {own}, so a group "
            what += "of one is not a group of the other"
            yield Finding(_SCHEDULE, what, f"{_HINT}, or the same degrees for both", (("roles",),))
    if own and job.prompts_per_rank < 2:
        what = "schedule streamed: a rank has one prompt group, and none could be trained on while others decode"
        hint = f"{_HINT}, or workload.prompts: {2 * own} or more"
        yield Finding(_SCHEDULE, what, hint, (("workload", "prompts"),))
