"""The loss of one step, group by group, from the plan's data: no line of the user's program runs in a worker.

before the first group    what mixes the prompts of the step, but for the divisor
group m                   the plan's records on the rows and log-probabilities of group m, then backward
behind the last group     the divisor: sums of loss and gradient times `scale`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rollplex.ir.errors import RunError
from rollplex.ir.grouploss import group_loss, row_values, scale_of, undivided, wide_values
from rollplex.ir.plan import Plan


class StepLoss:
    """Collects detached scores [1, group, response] by group; evaluates and backpropagates the loss of each group.

    A group is one of the rank's `prompts`, by its number there; what comes from outside has all prompts of the step.
    """

    def __init__(self, plan: Plan, prompts: range) -> None:
        self._own = prompts
        (self._plan,) = plan.losses.values()  # a plan for this backend trains one role
        self.prompts = next(record.name for record in plan.graph if record.op == "input")
        self.rollout = next(record.name for record in plan.graph if record.op == "rx.generate")
        self._scores: dict[str, dict[int, Tensor]] = {}
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._sum = 0.0
        self._scale = 1.0
        self._scores.clear()
        self._wide = None

    @property
    def total(self) -> float:
        """The loss of the rank's groups so far; the step's divisor is known when `scale` has been asked for."""
        return self._sum * self._scale

    def score(self, node: str, group: int, logprobs: Tensor) -> None:
        """Keep the scores of one group by a role that is not trained."""
        self._scores.setdefault(node, {})[group] = logprobs

    def scored(self, node: str) -> Tensor:
        """The scores of a node so far [prompt, group, response]."""
        return torch.cat([scores for _, scores in sorted(self._scores[node].items())])

    def scale(self, inputs: Mapping[str, Any]) -> float:
        """What makes the sums over groups, of loss and gradient, those of the step: once, behind the last group."""
        self._scale = scale_of(self._plan, inputs)
        return self._scale

    def backward(self, node: str, group: int, logprobs: Tensor, inputs: Mapping[str, Any]) -> None:
        """The undivided loss of one group and its backward; RunError when it is not finite.

        A group's rows are computed from its own alone, whatever else is there: the same bits in every schedule.
        """
        rows = row_values(self._plan, {n: self._cut(n, v, group) for n, v in inputs.items()}, self._step_values(inputs))
        loss = group_loss(self._plan, rows, {node: logprobs}, 0)
        value = float(loss.detach())
        if not torch.isfinite(loss.detach()):
            raise RunError(
                f"the loss of prompt group {self._own[group]} is {value}",
                where=f"%{self._plan.loss}",
                hint="look for log-probabilities of -inf, a division by zero, or a reward that is not finite",
            )
        self._sum += value
        loss.backward()

    def _step_values(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What mixes the prompts of the step, and 1 for the divisor."""
        if self._wide is None:
            names = tuple(name for name in self._plan.wide if name != self._plan.divisor)
            self._wide = wide_values(self._plan, inputs, names) | undivided(self._plan)
        return self._wide

    def _cut(self, name: str, value: Any, group: int) -> Any:
        """The rows of one of the rank's groups."""
        if name in self._scores:
            return self._scores[name][group]
        prompt = self._own[group]
        return value[prompt : prompt + 1] if isinstance(value, Tensor) else value.of(range(prompt, prompt + 1))
