"""What an engine takes from one step to the next: its planned objects, wherever the plan keeps them.

copied   snapshot, tower, rebuilt buffer; master and moments too, unless a distributed optimizer shares them out
own      a distributed optimizer's share of master and moments
facts    digests of what frozen roles hold, so that a run does not go on against other reference weights
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rollplex.backends.carried import Carried
from rollplex.backends.digest import KIND, digest
from rollplex.backends.memory.planned import PlannedObjects
from rollplex.backends.training.placement import DTYPES
from rollplex.ir.errors import RunError
from rollplex.ir.job import Job

UNFINISHED = "rollout.carried"
"""Responses that go on in the next step: each rollout engine has those to its own prompts."""


class CarriedObjects:
    """The objects of one rank that a checkpoint holds, each as one flat tensor."""

    def __init__(self, job: Job, objects: PlannedObjects) -> None:
        self.job = job
        self.objects = objects
        self._state = {name for role in job.trained for name in _state(role)}
        shared_out = (role for role in job.trained if job.trainer(role).distributed_optimizer)
        self._own = {UNFINISHED, *(name for role in shared_out for name in _state(role))}

    def carried(self) -> Carried:
        """Live memory of the objects."""
        tensors = {name: self._current(name) for name in self.objects.carried()}
        own = {name: tensor for name, tensor in tensors.items() if name in self._own}
        copied = {name: tensor for name, tensor in tensors.items() if name not in self._own}
        return Carried(own, copied, {"frozen": self._frozen, "digests": KIND})

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Put every object back where it is when an iteration starts; RunError for other frozen weights."""
        if facts.get("digests") != KIND:
            what = "the checkpoint's digests of frozen weights are another version's"
            raise RunError(what, where="--resume", hint="go on with the version of rollplex that wrote it")
        for name, found in self._frozen.items():
            if facts["frozen"].get(name) != found:
                hint = "bring back the initial weights of that run"
                raise RunError(f"{name} is not what the run began with", where="run.weights", hint=hint)
        for name in self.objects.carried():
            self._current(name).copy_(tensors[name])
        self.objects.filled(*self.objects.carried())

    @cached_property
    def _frozen(self) -> dict[str, str]:
        where = self.objects.device.torch
        return {name: digest(self._current(name), device=where) for name in self.objects.frozen()}

    def _current(self, name: str) -> Tensor:
        return self.objects.current(name, self._dtype(name))

    def _dtype(self, name: str) -> torch.dtype:
        model = DTYPES[self.job.model.dtype]
        return torch.float32 if name in self._state and model != torch.float64 else model


def _state(role: str) -> tuple[str, str]:
    """The objects of a role's optimizer state, which are of the state's dtype."""
    return f"{role}.master", f"{role}.moments"
