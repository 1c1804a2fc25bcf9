"""The losses of one step, group by group, from the plan's data: no line of the user's program runs in a worker.

before the first group    what mixes the prompts of the step, but for the divisor
group m                   the plan's records on the rows of group m and what the trained model says of it, then backward
behind the last group     the divisor: sums of loss and gradient times `scale`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rollplex.backends.collectives import Groups
from rollplex.backends.data.parts import wholes_of
from rollplex.ir.errors import RunError
from rollplex.ir.grouploss import group_loss, row_values, scale_of, undivided, wide_values
from rollplex.ir.job import Job
from rollplex.ir.parts import part, wholes
from rollplex.ir.placement import Seat, rollout_seat
from rollplex.ir.plan import LossPlan, NodeRecord, Plan, references
from rollplex.ir.planned_hosts import early_hosts

WHOLE = {"rx.logprobs": "logprobs", "rx.values": "values", "rx.score": "score"}
"""Calls that are not split, and what they give."""


class Scores:
    """What the models of this rank have said in a step, detached, [1, group, ..] a group; losses are made of it.

    A group is one of the rank's prompts, by its number there; what comes from outside has all prompts of the step, or,
    under `streamed`, a row for each data-parallel rank. `read` is what a prefix or a call on responses reads, a history
    or responses, and `turn` which turn that is of, from 1 on; `whole` are the prompts of a call that is not split.
    `early` are values that were made before the rollout, of all prompts that were sampled for.
    `heads` says of each model call what it gives, logprobs, values or score, and `roles` whose it is.
    """

    def __init__(self, plan: Plan, seat: Seat, ranks: Groups) -> None:
        self.own, self._copy, self._ranks = seat.prompts, seat.copy, ranks
        self.prompts = next(record.name for record in plan.graph if record.op == "input")
        self.rollout = next(record.name for record in plan.graph if record.op == "rx.generate")
        self.early = early_hosts(plan)
        self.turns = sum(record.op == "rx.generate" for record in plan.graph)
        calls = {record.name: record for record in plan.graph if record.op in ("rx.suffix", *WHOLE)}
        self.read = {r.name: _read_by(r) for r in plan.graph if r.op == "rx.prefix" or r.name in calls}
        self.whole = {n: next(references(r.args[1:2])) for n, r in calls.items() if r.op in WHOLE}
        self.turn = _turns(plan) | dict.fromkeys(self.whole, 1)
        self.heads = {n: WHOLE.get(r.op) or r.kwargs.get("head", "logprobs") for n, r in calls.items()}
        self.roles = {name: str(record.args[0]) for name, record in calls.items()}
        self._found: dict[str, dict[int, Tensor]] = {}
        seats = [rollout_seat(Job.model_validate(plan.job), rank) for rank in range(plan.processes["rollout"].ranks)]
        self._engine = {prompt: engine.copy for engine in seats for prompt in engine.prompts}
        self._gaps: dict[int, tuple[float, int]] = {}

    def begin(self) -> None:
        """A new step."""
        self._found.clear()
        self._gaps.clear()

    def score(self, node: str, group: int, found: Tensor) -> None:
        """Keep what a model says of one group."""
        self._found.setdefault(node, {})[group] = found

    def scored(self, node: str) -> Tensor:
        """What was said at a node so far [prompt, group, ..]."""
        return torch.cat([found for _, found in sorted(self._found[node].items())])

    def means(self) -> dict[str, float]:
        """The mean score of every reward model on this rank, by its role, and how far both engines are apart.

        `logprob_gap` is the mean |log p trained - log p sampled| of the sampled tokens, in nats: rounding alone where
        the engines agree on the model, more where an update is not on-policy. Where there are several rollout engines,
        `logprob_gap_engine_1` is that of the second one's tokens.
        """
        found = {self.roles[n]: float(self.scored(n).mean()) for n in self._found if self.heads[n] == "score"}
        gaps, several = self._gaps, len(set(self._engine.values())) > 1
        total, tokens = (sum(column) for column in zip((0.0, 0), *gaps.values(), strict=True))
        found |= {"logprob_gap": total / tokens} if tokens else {}
        return found | {f"logprob_gap_engine_{e}": t / n for e, (t, n) in sorted(gaps.items()) if several and n}

    def compare(self, node: str, said: Tensor, inputs: Mapping[str, Any], group: int) -> None:
        """Note what the policy says [1, n, T] of a group's tokens beside what they were sampled with."""
        rollout = self.row(self.read[node], inputs, group)
        engine = self._engine[self.own[group]]
        total, tokens = self._gaps.get(engine, (0.0, 0))
        gaps = (said.detach() - rollout.logprobs).abs()[rollout.mask]
        self._gaps[engine] = (total + float(gaps.sum()), tokens + gaps.numel())

    def row(self, name: str, inputs: Mapping[str, Any], group: int) -> Any:
        """The rows [1, ..] of one of the rank's groups, of what its own models say or of a value, whole or in parts."""
        if name in self._found:
            return self._found[name][group]
        parted = part(name, group) in inputs
        value, row = (inputs[part(name, group)], self._copy) if parted else (inputs[name], self.own[group])
        return value[row : row + 1] if isinstance(value, Tensor) else value.of(range(row, row + 1))

    def widen(self, name: str, value: Any) -> Any:
        """The rows of all prompts of the step, in their order: what models say is gathered from all ranks."""
        if name not in self._found:
            return value
        return self._ranks.all_gather("dp", value.movedim(0, -1)).movedim(-1, 0)


def _read_by(record: NodeRecord) -> str:
    """The prompts of a prefix, the responses of any other call."""
    return next(references(record.args[1:2] if record.op == "rx.prefix" else record.args[2:3]))


def _turns(plan: Plan) -> dict[str, int]:
    """The turn of every prefix and suffix: a prefix that extends another is of the turn behind it."""
    found: dict[str, int] = {}
    for record in (r for r in plan.graph if r.op in ("rx.prefix", "rx.suffix")):
        before = [found[name] for name in references(record.args) if name in found]
        found[record.name] = max(before, default=0) + (record.op == "rx.prefix")
    return found


class StepLoss:
    """Evaluates and backpropagates a trained role's loss, group by group."""

    def __init__(self, plan: LossPlan, scores: Scores) -> None:
        self._plan, self._scores = plan, scores
        self.forward = plan.forward
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._sum = 0.0
        self._scale = 1.0
        self._wide: dict[str, Any] | None = None

    @property
    def total(self) -> float:
        """The loss of the rank's groups so far; the step's divisor is known when `scale` has been asked for."""
        return self._sum * self._scale

    def scale(self, inputs: Mapping[str, Any]) -> float:
        """What makes the sums over groups, of loss and gradient, those of the step: once, behind the last group."""
        self._scale = scale_of(self._plan, self._widened(wholes_of(inputs), self._plan.divisor_inputs))
        return self._scale

    def backward(self, forward: Mapping[str, Tensor], group: int, inputs: Mapping[str, Any]) -> None:
        """The undivided loss of one group and its backward; RunError when it is not finite.

        `forward` has what the trained model says of the group at each of its nodes: one, or one a turn.
        A group's rows are computed from its own alone, whatever else is there: the same bits in every schedule.
        """
        wide = self._step_values(inputs)
        rows = row_values(self._plan, {n: self._scores.row(n, inputs, group) for n in wholes(inputs)}, wide)
        loss = group_loss(self._plan, rows, forward, 0)
        value = float(loss.detach())
        if not torch.isfinite(loss.detach()):
            raise RunError(
                f"the loss of prompt group {self._scores.own[group]} is {value}",
                where=f"%{self._plan.loss}",
                hint="look for log-probabilities of -inf, a division by zero, or a reward that is not finite",
            )
        self._sum += value
        loss.backward()

    def _step_values(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What mixes the prompts of the step, and 1 for the divisor."""
        if self._wide is None:
            names = tuple(name for name in self._plan.wide if name != self._plan.divisor)
            wide = self._widened(inputs, self._plan.wide_inputs) if names else {}
            self._wide = wide_values(self._plan, wide, names) | undivided(self._plan)
        return self._wide

    def _widened(self, inputs: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        """Values of all prompts of the step; every rank asks for the same at the same time."""
        return {n: self._scores.widen(n, inputs[n]) for n in names if n in inputs}
