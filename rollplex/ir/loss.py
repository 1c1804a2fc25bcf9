"""A loss as data, taken apart by prompt group, and how a trainer computes it group by group.

loss = masked_mean(f(logp), mask)      step    count = mask_count(mask)
                                       group m loss_m = masked_sum(f(logp_m), mask_m) / count
                                       loss = sum over m of loss_m, and so are its gradients

wide = wide_values(plan, {"rollout": rollout})                       once, from the prompts of all ranks
rows = row_values(plan, {"rollout": .., "score": .., "ref_logp": ..}, wide)       for this rank's prompts
for m in range(groups): group_loss(plan, rows, {"logp": logp_of(m)}, m).backward()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rollplex.ir.plan import NodeRecord
from rollplex.ir.records import evaluate
from rollplex.ir.steps import Strict


class LossPlan(Strict):
    """A loss as data; `step` runs without grad, `group` with grad on one prompt group, `result` summed is the loss.

    `wide` values mix the prompts of the whole step (over all ranks) and must be computed from all of them, out of
    `wide_inputs`; `sliced` values have the prompt dim first and are cut to a group, `whole` values are passed on.
    """

    role: str
    loss: str
    step: tuple[NodeRecord, ...]
    group: tuple[NodeRecord, ...]
    result: str
    forward: tuple[str, ...]
    wide: tuple[str, ...]
    wide_inputs: tuple[str, ...]
    sliced: tuple[str, ...]
    whole: tuple[str, ...]


def wide_values(plan: LossPlan, env: Mapping[str, Any]) -> dict[str, Any]:
    """Values that mix the prompts of the step: divisors, batch statistics. `env` has `wide_inputs` of all prompts."""
    with torch.no_grad():
        return evaluate(plan.step, env, plan.wide)


def row_values(plan: LossPlan, env: Mapping[str, Any], wide: Mapping[str, Any]) -> dict[str, Any]:
    """The other values known before the forward, for the prompts whose model and host results are in `env`."""
    with torch.no_grad():
        return evaluate(plan.step, {**env, **wide}, (*plan.sliced, *plan.whole))


def group_loss(plan: LossPlan, rows: Mapping[str, Any], forward: Mapping[str, Any], group: int) -> torch.Tensor:
    """The loss of one prompt group, to run backward from: `forward` has the trained role's results [1, group, ..]."""
    cut = {name: rows[name][group : group + 1] for name in plan.sliced}
    whole = {name: rows[name] for name in plan.whole}
    return evaluate(plan.group, {**cut, **whole, **forward}, (plan.result,))[plan.result]
