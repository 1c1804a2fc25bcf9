"""What dynamic sampling came to in a run, beside what the job has guessed for its predicted times.

rounds     1.8 a step for 8 groups, 11.2 sampled; 71 % kept (the job guesses 60 %)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollplex.ir.job import Job


@dataclass(frozen=True)
class SampledGroups:
    """Means a step of rounds and of groups sampled; the share of all groups sampled that taught something.

    `short_steps` trained on fewer groups than the job asks for: `short_groups` fewer, all in all.
    """

    rounds: float
    groups: float
    wanted: int
    kept_share: float
    guessed_share: float
    short_steps: int
    short_groups: int


def sampled_groups(job: Job, metrics: Sequence[Mapping[str, float]]) -> SampledGroups | None:
    """The account of the steps that these metrics are of; None where every prompt is sampled for once."""
    again, rows = job.workload.dynamic_sampling, [row for row in metrics if "groups_sampled" in row]
    if again is None or not rows:
        return None
    total = {name: sum(row[name] for row in rows) for name in ("rounds", "groups_sampled", "groups_kept")}
    short = [int(row["groups_short"]) for row in rows]
    return SampledGroups(
        rounds=total["rounds"] / len(rows),
        groups=total["groups_sampled"] / len(rows),
        wanted=job.workload.prompts,
        kept_share=total["groups_kept"] / total["groups_sampled"],
        guessed_share=again.kept,
        short_steps=sum(count > 0 for count in short),
        short_groups=sum(short),
    )
