"""Values that came group by group, as values of the whole step again.

part m has a row for each data-parallel rank d: prompt d * groups + m    joined([part 0, part 1, ..]) is in prompt order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollplex.backends.data.rollout import Rollout
from rollplex.ir.parts import group_of, whole


def joined(parts: Sequence[Any]) -> Any:
    """All prompts of the step, of the parts of all groups: tensors [ranks, ..] or rollouts."""
    if isinstance(parts[0], Rollout):
        fields = zip(*(p.fields for p in parts), strict=True)
        return Rollout(*(joined(same) for same in fields))
    assert all(isinstance(p, Tensor) for p in parts), "parts are tensors and rollouts"
    return torch.stack(list(parts), dim=1).flatten(0, 1)


def wholes_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A task's inputs by the names of the graph, parts of all groups joined."""
    found = {name: value for name, value in inputs.items() if group_of(name) is None}
    parts: dict[str, dict[int, Any]] = {}
    for name, value in inputs.items():
        if (group := group_of(name)) is not None:
            parts.setdefault(whole(name), {})[group] = value
    return found | {name: joined([value for _, value in sorted(own.items())]) for name, own in parts.items()}
