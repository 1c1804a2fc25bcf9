"""The work of a training rank on prompt groups: what prefix, suffix, train and prefix_backward do with a role's model.

group m    prefix -> pieces[role, turn]      suffix, train read them      prefix_backward lets them go
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.memory.planned import PlannedObjects
from rollplex.backends.rolemodel import Prefix, RoleModel
from rollplex.backends.training.boundary import boundary_leaf
from rollplex.backends.training.gradients import FlatGradients
from rollplex.backends.training.loss import Scores, StepLoss
from rollplex.backends.training.saved import ALIGN, SavedPolicy
from rollplex.ir.job import Job
from rollplex.ir.placement import Seat
from rollplex.ir.plan import Plan
from rollplex.ir.planned_turns import turned
from rollplex.ir.steps import Run


@dataclass
class Group:
    """One prompt group between its prefix and its prefix backward.

    `pieces` are those of a role's boundary by turn: one for the group, behind turn 1 one for each trajectory. `said` is
    what a trained role says of the group at each node of its loss, `units` what it read there.
    """

    pieces: dict[tuple[str, int], list[Piece]] = field(default_factory=dict)
    said: dict[str, Tensor] = field(default_factory=dict)
    units: dict[str, list[Unit]] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A piece of a boundary: its prefix, and its keys and values as suffixes and later pieces read them."""

    prefix: Prefix
    kv: Tensor


Unit = tuple[Piece | Prompt, list[Tensor]]
"""Responses that run through a model together, and what they follow: a piece, or where a call is whole their prompt."""


@dataclass
class GroupWork:
    """The tasks of one rank, whichever engine runs the models; a group is one of the rank's `prompts` of a step."""

    plan: Plan
    job: Job
    dtype: torch.dtype
    state_dtype: torch.dtype
    seat: Seat
    models: Mapping[str, RoleModel]
    gradients: Mapping[str, FlatGradients]
    objects: PlannedObjects
    scores: Scores
    losses: Mapping[str, StepLoss]
    groups: dict[int, Group] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """A new step."""
        self.groups = {slot: Group() for slot in range(len(self.seat.sampled))}
        self.slots = list(range(len(self.seat.prompts)))

    def of_taken(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Once the taken prompts are known, tasks see no others; prefixes that ran before keep their slots."""
        rollout, prompts = inputs.get(self.scores.rollout), inputs.get(self.scores.prompts)
        if rollout is None:
            return inputs
        if self.job.overlapped:
            own = rollout.taken[self.seat.prompts.start : self.seat.prompts.stop]
            self.slots = (own - self.seat.sampled.start).tolist()
        chosen = {self.scores.prompts: prompts.take(rollout.taken)} if prompts is not None else {}
        if self.job.workload.rollout.kind != "full":  # else all are taken; what is made of them need not be numbers
            chosen |= {name: inputs[name][rollout.taken] for name in self.scores.early.intersection(inputs)}
        return {**inputs, **chosen}

    def _group(self, step: Run) -> Group:
        """The group of a task on responses: its prefix's slot holds it."""
        return self.groups[self.slots[step.microbatch]]

    def prefix(self, step: Run, inputs: Mapping[str, Any]) -> None:
        """Keys and values of a role's prefix, or of what is new in each history, into the boundary."""
        turn = self.scores.turn[step.node]
        # Among the prompts taken where the rollout is known, among those sampled where it is not.
        own = self.seat.prompts if self.scores.rollout in inputs else self.seat.sampled
        found = inputs[self.scores.read[step.node]][own[step.microbatch]]
        prompts = (found,) if turn == 1 else found
        made = [self._piece(step, prompt, at, len(prompts)) for at, prompt in enumerate(prompts)]
        self.groups[step.microbatch].pieces[step.role, turn] = made

    def _piece(self, step: Run, prompt: Any, at: int, of: int) -> Piece:
        """One of the `of` pieces that a prefix step makes: it extends those of earlier turns."""
        group, turn, attached = self.groups[step.microbatch], self.scores.turn[step.node], self._attached(step)
        earlier = [group.pieces[step.role, t] for t in range(1, turn)]
        before = [pieces[min(at, len(pieces) - 1)].kv for pieces in earlier]
        slot, saved = self._boundary_slot(step, at, of), self._saved_policy(step, at, of) if attached else None
        made = self.models[step.role].prefix(prompt, slot, attached, saved, before)
        return Piece(made, boundary_leaf(made.kv) if attached else made.kv)

    def _attached(self, step: Run) -> bool:
        return step.role in self.job.trained

    def suffix(self, step: Run, inputs: Mapping[str, Any]) -> None:
        """What a frozen role says of a group."""
        with torch.no_grad():
            found = [self._numbers(step.node, step.role, unit) for unit in self._units(step, inputs)]
        self.scores.score(step.node, step.microbatch, torch.cat(found, dim=1))
        if self.scores.turn[step.node] == self.scores.turns:
            self._forget(step)

    def _forget(self, step: Run) -> None:
        pieces = self._group(step).pieces
        for key in [key for key in pieces if key[0] == step.role]:
            del pieces[key]

    def train(self, step: Run, inputs: Mapping[str, Any]) -> None:
        """Where the plan takes a group in parts, or a loss has several turns, the loss sees all of it first.

        Then each part runs again, with its backward.
        """
        group, units, loss = self._group(step), self._units(step, inputs), self.losses[step.role]
        once = len(units) == len(loss.forward) == 1
        with torch.set_grad_enabled(once):
            found = torch.cat([self._numbers(step.node, step.role, unit) for unit in units], dim=1)
        group.said[step.node], group.units[step.node] = found if once else found.requires_grad_(), units
        if step.outputs:
            self.scores.score(step.node, step.microbatch, found.detach())
        if step.role == self.job.policy:
            self.scores.compare(step.node, found, inputs, step.microbatch)
        if any(node not in group.said for node in loss.forward):
            return
        loss.backward({node: group.said[node] for node in loss.forward}, step.microbatch, inputs)
        for node in () if once else loss.forward:
            self._again(node, step.role, group)
        for node in loss.forward:
            del group.said[node]

    def _again(self, node: str, role: str, group: Group) -> None:
        """The backward of a node, part by part, from the loss's derivative of what was said there."""
        units, grads = group.units.pop(node), group.said[node].grad
        assert grads is not None, "the loss depends on what the model says"
        for unit, grad in zip(units, grads.split([len(responses) for _, responses in units], dim=1), strict=True):
            self._numbers(node, role, unit).backward(grad)

    def prefix_backward(self, step: Run) -> None:
        """A later piece adds to the gradients of those that it extends, and so comes first."""
        for piece in self._group(step).pieces.pop((step.role, self.scores.turn[step.node])):
            assert piece.kv.grad is not None, "a prefix backward follows its train step"
            self.models[step.role].prefix_backward(piece.prefix, piece.kv.grad, self.gradients[step.role].begins)

    # ---- pieces

    def _units(self, step: Run, inputs: Mapping[str, Any]) -> list[Unit]:
        """The responses of a group, as many at a time as the plan has room for; of later turns one at a time."""
        turn = self.scores.turn[step.node]
        responses = self.scores.row(self.scores.read[step.node], inputs, step.microbatch).responses(0)
        if step.node in self.scores.whole:
            prompts = self.scores.row(self.scores.whole[step.node], inputs, step.microbatch)[0]
            each = (prompts,) * len(responses) if isinstance(prompts, Prompt) else prompts
            return [(prompt, [response]) for prompt, response in zip(each, responses, strict=True)]
        pieces = self._group(step).pieces[step.role, turn]
        if turn > 1:
            return [(piece, [response]) for piece, response in zip(pieces, responses, strict=True)]
        size = self.plan.summary.chunks.microbatch.suffix_responses
        return [(pieces[0], responses[i : i + size]) for i in range(0, len(responses), size)]

    def _numbers(self, node: str, role: str, unit: Unit) -> Tensor:
        """What a role's model says of some responses, in the dtype of losses.

        Log-probabilities or values [1, responses, response_tokens], scores [1, responses].
        """
        (piece, responses), temperature = unit, self.job.run.temperature
        recompute = role in self.job.trained and self.job.roles[role].recompute == "full"
        model, head = self.models[role], self.scores.heads[node]
        if isinstance(piece, Prompt):
            found = model.whole(piece, responses[0], head, temperature, recompute)
        elif head == "score":
            found = model.scores(piece.prefix, piece.kv, responses, recompute)
        elif head == "values":
            found = model.values(piece.prefix, piece.kv, responses, recompute)
        else:
            found = model.logprobs(piece.prefix, piece.kv, responses, temperature, recompute)
        if head == "score":
            return found[None].to(self.state_dtype)
        room = self.job.workload.response_tokens - found.shape[1]
        return torch.nn.functional.pad(found, (0, room))[None].to(self.state_dtype)

    def _boundary_slot(self, step: Run, at: int, of: int) -> Tensor:
        """Room for one of the `of` pieces of a group."""
        turn, load = self.scores.turn[step.node], self.job.workload
        shape = self.models[step.role].boundary_shape(load.prompt_tokens if turn == 1 else load.new_tokens)
        name = turned(f"{step.role}.boundary", turn)
        elements, place = torch.Size(shape).numel(), self._slot_of(step, name) * of + at
        flat = self.objects.pages(name, self.dtype)
        return flat[place * elements : (place + 1) * elements].view(shape)

    def _saved_policy(self, step: Run, at: int, of: int) -> SavedPolicy:
        """Where the plan keeps what this prefix saves: its slot in HBM, in the pinned pool, or nowhere."""
        name = turned(f"{step.role}.prefix_saved", self.scores.turn[step.node])
        recompute = self.job.roles[step.role].recompute
        assert recompute != "selective", "a job that asks it of the host engine is refused"
        if name in step.writes:
            memory = self.objects.pages(name, torch.uint8)
        elif name in step.streams:
            memory = self.objects.slot(name, torch.uint8)
        else:
            return SavedPolicy("dropped", recompute)
        place, slots = self._slot_of(step, name) * of + at, self.plan.object(name).slots
        size = memory.numel() // (slots * of) // ALIGN * ALIGN
        pool = memory[place * size : (place + 1) * size]
        return SavedPolicy("hbm" if name in step.writes else "host", recompute, pool)

    def _slot_of(self, step: Run, name: str) -> int:
        """A group's slot of an object: its own, or the only one, which groups have one behind the other."""
        return step.microbatch if self.plan.object(name).slots > 1 else 0
