"""The rounds of a step on the controller: what groups have scored, which of them the loss leaves out, and the account.

round 1   8 sampled, 5 kept    round 2   3 sampled, 2 kept    round 3   1 sampled, 0 kept    7 of 8: one is short

A group is kept where the plan's mask (`summary.rounds.keeps`) keeps a token of it. Each round samples as many groups
as are missing, so none is left over; a group stands where its prompt's number is, whichever round it came in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollplex.backends.data.batch import PromptBatch
from rollplex.backends.data.rollout import Rollout
from rollplex.ir.errors import RunError
from rollplex.ir.job import Job
from rollplex.ir.parts import round_of, whole
from rollplex.ir.plan import Plan
from rollplex.ir.planned_rounds import Rounds
from rollplex.ir.records import evaluate
from rollplex.ir.steps import Run
from rollplex.runtime.steprows import RoundRows


class RoundLog:
    """One step's rounds; `hosts` are the nodes of the host functions that say which groups are kept."""

    def __init__(self, plan: Plan, job: Job, rounds: Rounds, rows: RoundRows) -> None:
        self.plan, self.job, self.rounds, self.rows = plan, job, rounds, rows
        runs = (s for s in plan.programs["controller"] if isinstance(s, Run) and s.task == "host")
        self.hosts = tuple(dict.fromkeys(s.node for s in runs if round_of(s.outputs[0]) is not None))
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._sampled: list[int] = []
        self._found: dict[str, list[Tensor]] = {}
        self._scores: dict[str, Tensor] = {}

    def samples(self, groups: int) -> None:
        """A round is for so many groups."""
        self._sampled.append(groups)

    def scored(self, host: str, numbers: Sequence[int], scores: Tensor) -> Tensor:
        """Scores [groups, group] of a round, of the prompts of these numbers; of all prompts of the step so far."""
        self._found.setdefault(host, []).append(scores)
        places = torch.tensor(list(numbers), dtype=torch.int64)
        before = self._scores.get(host)
        self._scores[host] = scores if before is None else before.index_copy(0, places, scores)
        return self._scores[host]

    def mean_of_all(self, host: str) -> float:
        """The mean score of all that was sampled: that of the groups kept says nothing of those left out."""
        return float(torch.cat(self._found[host]).mean())

    def left_out(self, values: Mapping[str, Any]) -> list[int]:
        """The numbers of the prompts whose groups the loss leaves out, of those that a round has sampled for."""
        known = {whole(name): value for name, value in values.items()}
        rollout = next(value for value in known.values() if isinstance(value, Rollout))
        if not len(rollout.taken):
            return []
        known |= {n: v.take(rollout.taken) for n, v in known.items() if isinstance(v, PromptBatch)}
        mask = evaluate(self.plan.graph, known, (self.rounds.keeps,))[self.rounds.keeps]
        kept = mask.reshape(len(rollout.taken), -1).any(1)
        return rollout.taken[~kept].tolist()

    def settled(self, step: int, host: str, values: Mapping[str, Any]) -> dict[str, float]:
        """The account of a step, once the last of `hosts` has judged its last round; empty before.

        RunError where groups are short and the job wants no such step.
        """
        if host != self.hosts[-1]:
            return {}
        short, groups = self.left_out({**values, **self._scores}), len(self._scores[host])
        sampled, kept = sum(self._sampled), groups - len(short)
        if short and self.job.run.when_short == "stop":
            raise self._short(step, len(short), groups, sampled)
        rounds = sum(count > 0 for count in self._sampled)
        counts = {"rounds": rounds, "groups_sampled": sampled, "groups_kept": kept, "groups_short": len(short)}
        return {name: float(count) for name, count in counts.items()} | {"kept_share": kept / sampled}

    def _short(self, step: int, short: int, groups: int, sampled: int) -> RunError:
        mask = next(record for record in self.plan.graph if record.name == self.rounds.keeps)
        what = (
            f"{short} of {groups} prompt groups still teach nothing after {self.rounds.most} rounds ({sampled} groups "
            f"sampled, {groups - short} kept): the loss's mask, {mask.loc}, keeps no token of the others"
        )
        hint = (
            "raise workload.dynamic_sampling.rounds, or give run.data whose prompts are neither all solved nor all "
            "failed, or go on with --resume and run.when_short=fill, on the groups that were kept"
        )
        return RunError(what, where=f"step {step + 1}, workload.dynamic_sampling", hint=hint)
