"""A role's model in one process: transformers' modules whose parameters are views of planned objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.hf.model import HostModel, bind, build_model, freeze
from rollplex.backends.host.prefix import boundary_shape, run_prefix
from rollplex.backends.host.suffix import suffix_logprobs, suffix_scores, suffix_values
from rollplex.backends.host.whole import whole_numbers
from rollplex.backends.memory.planned import PlannedObjects
from rollplex.backends.training.boundary import Begins, PrefixResult, prefix_backward
from rollplex.backends.training.gradients import FlatGradients
from rollplex.backends.training.placement import (
    DTYPES,
    PARTS,
    PREFIXES,
    config_of,
    fill,
    split,
    trained_tensors,
    views,
    weight_objects,
)
from rollplex.backends.training.saved import SavedPolicy
from rollplex.backends.training.weights import save_weights
from rollplex.ir.job import Job
from rollplex.ir.spec import Part


class Replica:
    """`RoleModel` of one rank that has all of a role's weights; `trained` says whether gradients are wanted.

    The role's planned objects hold its language tensors as the rollout engine fuses them (placement.py).
    """

    def __init__(self, job: Job, role: str, objects: PlannedObjects, trained: bool) -> None:
        self.job, self.role = job, role
        dtype = DTYPES[job.model.dtype]
        self.objects: dict[Part, str] = weight_objects(job, role, objects.has)
        self.dtype = dtype
        whole: dict[Part, Tensor] = {p: objects.pages(n, dtype) for p, n in self.objects.items()}
        self.weights: dict[str, Tensor] = views(whole, job, role)
        self.model: HostModel = build_model(config_of(job, role), dtype, job.spec_of(role).head)
        bind(self.model, {name: self.weights[name] for name, _ in self.model.named_parameters()})
        frozen = job.roles[role].freeze if trained else PARTS
        freeze(self.model, [prefix for part in frozen for prefix in PREFIXES[part]])

    @property
    def trained(self) -> tuple[tuple[str, int], ...]:
        return tuple((t.name, t.numel) for t in trained_tensors(self.job, self.role))

    def counted(self, name: str) -> bool:
        return True

    def sources(self, name: str) -> tuple[str, ...]:
        return (name,)

    def boundary_shape(self, prefix_tokens: int) -> tuple[int, int, int, int, int]:
        return boundary_shape(config_of(self.job, self.role), prefix_tokens)

    def prefix(
        self, prompt: Prompt, slot: Tensor, attached: bool, saved: SavedPolicy | None, before: Sequence[Tensor]
    ) -> PrefixResult:
        return run_prefix(self.model, prompt, slot, attached=attached, saved=saved, before=before)

    def logprobs(
        self, prefix: PrefixResult, kv: Tensor, responses: Sequence[Tensor], temperature: float, recompute: bool
    ) -> Tensor:
        model, prompt, before = self.model, prefix.prompt, prefix.before
        return suffix_logprobs(model, kv, prompt, responses, temperature, recompute=recompute, before=before).cpu()

    def values(self, prefix: PrefixResult, kv: Tensor, responses: Sequence[Tensor], recompute: bool) -> Tensor:
        found = suffix_values(self.model, kv, prefix.prompt, responses, recompute=recompute, before=prefix.before)
        return found.cpu()

    def scores(self, prefix: PrefixResult, kv: Tensor, responses: Sequence[Tensor], recompute: bool) -> Tensor:
        found = suffix_scores(self.model, kv, prefix.prompt, responses, recompute=recompute, before=prefix.before)
        return found.cpu()

    def whole(self, prompt: Prompt, response: Tensor, head: str, temperature: float, recompute: bool) -> Tensor:
        device = self.model.device
        found = whole_numbers(
            self.model, prompt.on(device, self.dtype), response.to(device), head, temperature, recompute
        )
        return found.cpu()

    def prefix_backward(self, prefix: PrefixResult, kv_grads: Tensor, begins: Begins) -> None:
        prefix_backward(prefix, kv_grads, begins)

    def accumulate(self, into: FlatGradients) -> None:
        slabs = split(into.flat, trained_tensors(self.job, self.role))
        for name, parameter in self.model.named_parameters():
            if name in slabs:
                into.take(parameter, slabs[name])

    def fill(self) -> None:
        fill(self.weights, self.job, self.role)

    def fill_master(self, masters: Mapping[str, Tensor]) -> None:
        fill({name: flat.view(self.weights[name].shape) for name, flat in masters.items()}, self.job, self.role)

    def initialise(self, part: Part, flat: Tensor) -> None:
        fill(views({part: flat}, self.job, self.role), self.job, self.role)

    def send(self, peer: Tensor) -> None:
        raise AssertionError("one rank has the whole model: there is nothing to exchange")

    def rebuild(self, buffer: Tensor) -> None:
        raise AssertionError("host engines order every tensor alike")

    def save(self, path: Path) -> None:
        save_weights(path, self.weights, config_of(self.job, self.role))
