"""A role's model in one process: transformers' modules whose parameters are views of planned objects."""

from __future__ import annotations

from torch import Tensor

from rollplex.backends.host.model import HostModel, bind, build_model, freeze
from rollplex.backends.host.placement import DTYPES, PARTS, PREFIXES, config_of, views
from rollplex.backends.host.planned import PlannedObjects
from rollplex.ir.job import Job
from rollplex.ir.spec import Part


class Replica:
    """Weights and model of one role in the training rank; `trained` says whether gradients are wanted.

    The policy's language weights are `ROLE.snapshot`, those of a frozen role `ROLE.weights`; a role without a tower of
    its own reads the policy's.
    """

    def __init__(self, job: Job, role: str, objects: PlannedObjects, trained: bool) -> None:
        self.role = role
        dtype = DTYPES[job.model.dtype]
        language = f"{role}.snapshot" if role == job.policy else f"{role}.weights"
        tower = f"{role}.vision" if objects.has(f"{role}.vision") else f"{job.policy}.vision"
        names: dict[Part, str] = {"language": language, "vision": tower}
        self.objects: dict[Part, str] = {part: name for part, name in names.items() if objects.has(name)}
        self.weights: dict[str, Tensor] = views({p: objects.pages(n, dtype) for p, n in self.objects.items()}, job)
        self.model: HostModel = build_model(config_of(job), dtype)
        bind(self.model, {name: self.weights[name] for name, _ in self.model.named_parameters()})
        frozen = job.roles[role].freeze if trained else PARTS
        freeze(self.model, [prefix for part in frozen for prefix in PREFIXES[part]])
