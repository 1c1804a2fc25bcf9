"""How a trainer computes a loss group by group, from the plan alone.

loss = masked_mean(f(logp), mask)      step    count = mask_count(mask)
                                       group m loss_m = masked_sum(f(logp_m), mask_m) / count
                                       loss = sum over m of loss_m, and so are its gradients

wide = wide_values(plan, {"rollout": rollout})                       once, from the prompts of all ranks
rows = row_values(plan, {"rollout": .., "score": .., "ref_logp": ..}, wide)       for this rank's prompts
for m in range(groups): group_loss(plan, rows, {"logp": logp_of(m)}, m).backward()

A divisor of the whole step is left to the end: `wide | undivided(plan)` in place of `wide` gives sums over groups that
`scale_of(plan, ..)` makes the loss and its gradient. So no group needs what other groups are made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollplex.ir.plan import LossPlan
from rollplex.ir.records import evaluate


def wide_values(plan: LossPlan, env: Mapping[str, Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """Values that mix the prompts of the step, all or some: divisors, statistics. `env` has what they are made of."""
    with torch.no_grad():
        return evaluate(plan.step, env, plan.wide if names is None else names)


def undivided(plan: LossPlan) -> dict[str, torch.Tensor]:
    """1 in place of the divisor, which divides nothing: x / 1 is x to the bit."""
    return {plan.divisor: torch.tensor(1)} if plan.divisor else {}


def scale_of(plan: LossPlan, env: Mapping[str, Any]) -> float:
    """What makes sums over all undivided groups the loss: 1 / divisor. `env` has `divisor_inputs` of all prompts."""
    if not plan.divisor:
        return 1.0
    with torch.no_grad():
        return 1.0 / float(evaluate(plan.step, env, (plan.divisor,))[plan.divisor])


def row_values(plan: LossPlan, env: Mapping[str, Any], wide: Mapping[str, Any]) -> dict[str, Any]:
    """The other values known before the forward, for the prompts whose model and host results are in `env`."""
    with torch.no_grad():
        return evaluate(plan.step, {**env, **wide}, (*plan.sliced, *plan.whole))


def group_loss(plan: LossPlan, rows: Mapping[str, Any], forward: Mapping[str, Any], group: int) -> torch.Tensor:
    """The loss of one prompt group, to run backward from: `forward` has the trained role's results [1, group, ..]."""
    cut = {name: rows[name][group : group + 1] for name in plan.sliced}
    whole = {name: rows[name] for name in plan.whole}
    return evaluate(plan.group, {**cut, **whole, **forward}, (plan.result,))[plan.result]
