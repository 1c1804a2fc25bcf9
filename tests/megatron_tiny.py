"""A rank of the Megatron model over one arena with an oracle's weights, what a training step makes of it; its plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from host_tiny import grpo_loss
from runtime_tiny import tiny_plan
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.megatron import memory
from rollplex.backends.megatron.groups import Group
from rollplex.backends.megatron.memory import Slab
from rollplex.backends.megatron.names import Stored, parameters
from rollplex.backends.megatron.rank import PARTS, MegatronModel
from rollplex.backends.megatron.weights import fill, gather
from rollplex.backends.training.boundary import boundary_leaf
from rollplex.backends.training.gradients import FlatGradients
from rollplex.backends.training.saved import SavedPolicy
from rollplex.ir.models import spec_from_config
from rollplex.ir.plan import Plan
from rollplex.ir.spec import Part

Groups = Sequence[tuple[Prompt, list[Tensor]]]
TEMPERATURE = 0.7
CASE_2 = Stored(frozenset({"o", "down"}), split_gate_up=True)  # TP_train > TP_rollout in stock order
POOL = 4 << 20


@dataclass(frozen=True)
class Case:
    """How a training step is run: what the plan may choose."""

    stored: Stored = field(default_factory=Stored)
    where: str = "hbm"
    prefix: str = "none"  # recompute of the prefix
    recompute: bool = False
    size: int = 100  # responses of a part
    frozen: tuple[Part, ...] = ()
    sequence: bool = False

    def saved(self) -> SavedPolicy:
        """A fresh policy, with a slot of the pool where one is needed."""
        pool = torch.zeros(POOL, dtype=torch.uint8) if self.where == "host" else None
        return SavedPolicy(self.where, self.prefix, pool)  # pyright: ignore[reportArgumentType]


def make_rank(
    config: dict[str, Any],
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    group: Group | None = None,
    case: Case | None = None,
    slab: Slab | None = None,
) -> tuple[MegatronModel, dict[Part, Tensor]]:
    """The model of one rank, its parameters views of one flat tensor a part that hold the Hugging Face values."""
    case, tp, spec = case or Case(), group.size() if group else 1, spec_from_config(config, "tiny")
    order = parameters(spec, tp, group.rank() if group else 0, case.stored)
    slabs = {"language": slab, "vision": None}
    pages: dict[Part, Tensor] = {
        part: torch.full((memory.numel([p for p in order if p.part == part], slabs[part]),), float("nan"), dtype=dtype)
        for part in PARTS
    }
    rank = MegatronModel(spec, dtype, pages, group, case.stored, slab, case.frozen, case.sequence)
    fill(rank.order, rank.views, lambda p: weights[p.source].narrow(p.axis, p.start, p.stop - p.start))
    return rank, pages


def group_here() -> Group | None:
    """The group of all processes; None in a process that is alone."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def train(rank: MegatronModel, groups: Groups, case: Case) -> list[Tensor]:
    """All prefixes first, as in phase 1; then each group's suffix and its prefix backward. Log-probabilities."""
    dtype, found = rank.model.dtype, []
    slots = [torch.full(rank.boundary_shape(40), float("nan"), dtype=dtype) for _ in groups]
    prefixes = [
        rank.prefix(prompt, slot, attached=True, saved=case.saved())
        for (prompt, _), slot in zip(groups, slots, strict=True)
    ]
    for (_, responses), prefix, slot in zip(groups, prefixes, slots, strict=True):
        parts = [responses[i : i + case.size] for i in range(0, len(responses), case.size)]
        leaf = boundary_leaf(prefix.kv)
        found.append(train_group(rank, prefix, leaf, parts, case.recompute))
        slot.fill_(float("nan"))  # it is someone else's by the time of the prefix backward
        assert leaf.grad is not None
        rank.prefix_backward(prefix, leaf.grad)
    return found


def train_group(rank: MegatronModel, prefix: Any, leaf: Tensor, parts: list[list[Tensor]], recompute: bool) -> Tensor:
    """The loss sees all parts, then each part is computed again with its own backward."""

    def score(part: list[Tensor]) -> Tensor:
        return rank.logprobs(prefix, leaf, part, TEMPERATURE, recompute=recompute)

    with torch.no_grad():
        rows = [row for part in parts for row in score(part)]
    lengths = torch.tensor([len(r) for part in parts for r in part])
    logprobs = pad_sequence(rows, batch_first=True).requires_grad_()
    grpo_loss(logprobs, torch.arange(logprobs.shape[1]) < lengths[:, None]).backward()
    assert logprobs.grad is not None
    for part, grad in zip(parts, logprobs.grad.split([len(p) for p in parts]), strict=True):
        found = score(part)
        found.backward(grad[:, : found.shape[1]])
    return logprobs.detach()


@dataclass(frozen=True)
class Step:
    """What one rank has after a step: log-probabilities, its own gradients, and on the first rank all of them."""

    logprobs: list[Tensor]
    copies: dict[str, Tensor]
    squares: float
    gathered: dict[str, Tensor] | None


def step(config: dict[str, Any], weights: Mapping[str, Tensor], dtype: torch.dtype, groups: Groups, case: Case) -> Step:
    """One training step of this process' rank: alone, or in the group of all."""
    rank, _ = make_rank(config, weights, dtype, group_here(), case)
    flat = torch.zeros(memory.numel(rank.trained), dtype=dtype)
    gradients = rank.accumulate(FlatGradients(flat))
    logprobs = train(rank, groups, case)
    assert all(p.grad is None for p in rank.model.parameters())
    everything = {p.name: torch.zeros(p.shape, dtype=dtype) for p in rank.order} | gradients
    return Step(
        logprobs,
        {p.name: gradients[p.name] for p in rank.trained if not p.sharded},
        sum(float(gradients[p.name].double().square().sum()) for p in rank.counted),
        gather(rank.spec, rank.stored, everything, rank.group),
    )


def megatron(tp: int) -> dict[str, Any]:
    """The engine of a job's role."""
    return {"engine": "megatron", "tensor_parallel": tp, "sequence_parallel": False}


def megatron_plan(tp: int, **changes: Any) -> Plan:
    """Megatron trains at this degree, the host engine rolls out; `changes` as of `tiny_plan`."""
    rollout = {"engine": "host", "kv_cache_gib": "1 MiB", "runtime_gib": "512 KiB"}
    base: dict[str, Any] = {
        "model": {"dtype": "float64"},
        "cluster": {"capacity_gib": "32 MiB", "gpus_per_node": tp},
        "roles": {"actor": {"train": megatron(tp), "rollout": rollout}, "reference": {"score": megatron(tp)}},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5, "no_decay": ["*.bias", "*norm*", "*lm_head*"]},
        "run": {"silent_s": 60},
    }
    return tiny_plan(**(base | changes))
