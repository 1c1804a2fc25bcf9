"""The loss of one step, group by group, from the plan's data: no line of the user's program runs in a worker.

before the first group    divisors and everything that does not need the trained role's forward, for all groups
group m                   the plan's `group` records on the log-probabilities of group m, then backward
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rollplex.ir.errors import RunError
from rollplex.ir.grouploss import group_loss, row_values, wide_values
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
        self.total = 0.0
        self._scores: dict[str, dict[int, Tensor]] = {}
        self._rows: dict[str, Any] | None = None

    def begin(self) -> None:
        """A new step."""
        self.total = 0.0
        self._scores.clear()
        self._rows = None

    def score(self, node: str, group: int, logprobs: Tensor) -> None:
        """Keep the scores of one group by a role that is not trained."""
        self._scores.setdefault(node, {})[group] = logprobs

    def scored(self, node: str) -> Tensor:
        """The scores of a node so far [prompt, group, response]."""
        return torch.cat([scores for _, scores in sorted(self._scores[node].items())])

    def _cut(self, name: str, value: Any) -> Any:
        """The rows of the rank's prompts; scores of its own models have no others."""
        if name in self._scores:
            return value
        return value[self._own.start : self._own.stop] if isinstance(value, Tensor) else value.of(self._own)

    def backward(self, node: str, group: int, logprobs: Tensor, inputs: Mapping[str, Any]) -> None:
        """The loss of one group and its backward; RunError when it is not finite."""
        if self._rows is None:
            wide = wide_values(self._plan, inputs)
            self._rows = row_values(self._plan, {n: self._cut(n, value) for n, value in inputs.items()}, wide)
        loss = group_loss(self._plan, self._rows, {node: logprobs}, group)
        value = float(loss.detach())
        if not torch.isfinite(loss.detach()):
            raise RunError(
                f"the loss of prompt group {self._own[group]} is {value}",
                where=f"%{self._plan.loss}",
                hint="look for log-probabilities of -inf, a division by zero, or a reward that is not finite",
            )
        self.total += value
        loss.backward()
