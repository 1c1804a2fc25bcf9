"""What a run of real processes leaves to judge it by: samples, gradients of the first step, weights, order of steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from combinations import Combination, plan_of, weights
from runtime_tiny import luck
from textbook import LOSSES, Textbook, Whole
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from rollplex.backends.carried import SavedTensors
from rollplex.backends.data.batch import PromptBatch
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.megatron import memory
from rollplex.backends.megatron.names import Stored, parameters
from rollplex.backends.megatron.weights import fill
from rollplex.backends.training.placement import SCORE, config_of, drawn, split, trained_tensors, views
from rollplex.backends.training.shares import shares_of
from rollplex.ir.job import Job
from rollplex.ir.placement import training_seat
from rollplex.ir.steps import Exchange, Run
from rollplex.runtime import feed
from rollplex.runtime.events import RunEvent, StepEntered
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.run import RunResult, run_plan

ENDS = tuple(range(0, 264, 7))
"""Tokens that end a response: one in seven, so that lengths differ."""


@dataclass
class Ran:
    """A finished run. `prompts` and `rollouts` are those of each step, where they came to the host function whole."""

    of: Combination
    job: Job
    result: RunResult
    prompts: list[PromptBatch] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    exchanges: dict[ProcessId, list[Exchange]] = field(default_factory=dict)

    def checkpoint(self, step: int, rank: int = 0) -> SavedTensors:
        return SavedTensors(self.result.out_dir / "checkpoints" / f"step-{step}" / f"train-{rank}.safetensors")

    def first_moments(self, role: str) -> Iterator[tuple[int, range, Tensor]]:
        """After step 1, of every rank that updates something: its tensor-parallel rank, which elements, exp_avg."""
        copies = self.of.copies if self.of.shares else 1
        numel = sum(sizes(self, role, 0))
        for rank in range(self.of.train * copies):
            seat = training_seat(self.job, rank)
            own = shares_of(numel, copies)[seat.copy]
            yield seat.tp, own, self.checkpoint(1, rank)[f"{role}.moments"][: len(own)]


@cache
def ran(of: Combination, schedule: str) -> Ran:
    """Two steps on processes, as a user would run them; what passed through the controller is kept."""
    plan, prompts, rollouts = plan_of(of, schedule), [], []
    exchanges: dict[ProcessId, list[Exchange]] = defaultdict(list)
    real = feed.Feed.run

    def noted(self: feed.Feed, step: Run, inputs: Any) -> Any:
        rollouts.extend(v for name, v in inputs.items() if name == "rollout" and step.task == "host")
        made = real(self, step, inputs)
        prompts.extend(v for v in made.values() if step.task == "load")
        return made

    def watch(event: RunEvent) -> None:
        if isinstance(event, StepEntered) and isinstance(event.step, Exchange):
            exchanges[event.process].append(event.step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "end_tokens", lambda tokenizer: ENDS)
        patch.setattr(feed.Feed, "run", noted)
        out = Path(mkdtemp(prefix="rollplex-test-")) / "run"
        result = run_plan(plan, hosts={"reward": luck}, out_dir=out, progress=watch)
    return Ran(of, Job.model_validate(plan.job), result, prompts, rollouts, dict(exchanges))


@dataclass
class Book:
    """The textbook's steps on what a run sampled; gradients and norms by step and role."""

    textbook: Textbook
    gradients: list[dict[str, dict[str, Tensor]]] = field(default_factory=list)
    norms: list[dict[str, float]] = field(default_factory=list)
    losses: list[dict[str, float]] = field(default_factory=list)
    logprobs: list[dict[tuple[int, ...], Tensor]] = field(default_factory=list)


@cache
def book(of: Combination) -> Book:
    """One process, whole sequences, transformers and torch.optim."""
    run = ran(of, "rollplex")
    roles = {role: Whole(config_of(run.job, role), begun(run, role)) for role in run.job.roles}
    found = Book(Textbook(run.job, roles, LOSSES[of.algorithm]))
    for prompts, rollout in zip(run.prompts, run.rollouts, strict=True):
        seen = found.textbook.step(prompts, [rollout], [], luck)
        found.gradients.append({role: dict(g) for role, g in found.textbook.gradients.items()})
        found.norms.append(dict(found.textbook.norms))
        found.losses.append(dict(found.textbook.losses))
        found.logprobs.append(seen.old)
    return found


def begun(run: Ran, role: str) -> dict[str, Tensor]:
    """Initial weights by name; a critic's head is drawn."""
    found = loaded(weights(run.of), run.of.dtype)
    if run.job.spec_of(role).head == "scalar":
        found = {name: w for name, w in found.items() if not name.startswith("lm_head.")}
        found[f"{SCORE}weight"] = drawn(f"{SCORE}weight", (1, run.of.config["hidden_size"]), run.job.run.seed)
    return found


def loaded(folder: Path, dtype: str) -> dict[str, Tensor]:
    """Parameters by name, as transformers reads a directory."""
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(str(folder), dtype=getattr(torch, dtype))
    return {name: p.detach() for name, p in model.named_parameters()}


def sizes(run: Ran, role: str, tp: int) -> list[int]:
    """Elements of each trained parameter of a tensor-parallel rank, in the flat order."""
    if run.of.trainer == "host":
        return [t.numel for t in trained_tensors(run.job, role)]
    return [p.numel for p in _order(run, role, tp)]


def _order(run: Ran, role: str, tp: int) -> list[Any]:
    stored = Stored.planned(plan_of(run.of, "rollplex").summary.layout)
    frozen = run.job.roles[role].freeze
    return [p for p in parameters(run.job.spec, run.of.train, tp, stored) if p.part not in frozen]


def laid_out(run: Ran, role: str, tp: int, values: dict[str, Tensor]) -> Tensor:
    """Values by Hugging Face name in the flat order of one rank; what nobody names is zero."""
    flat = torch.zeros(sum(sizes(run, role, tp)), dtype=torch.float64)
    if run.of.trainer == "host":
        for name, view in split(flat, trained_tensors(run.job, role)).items():
            view.copy_(values[name])
        return flat
    order = _order(run, role, tp)
    fill(order, memory.views(flat, order), lambda p: values[p.source].narrow(p.axis, p.start, p.stop - p.start))
    return flat


def ended(run: Ran, role: str) -> dict[str, Tensor]:
    """Weights behind the last step: the policy's as transformers loads them, another's from its last checkpoint."""
    if role == run.job.policy:
        return loaded(run.result.final, run.of.dtype)
    kept = run.checkpoint(2)
    return views({"language": kept[f"{role}.snapshot"], "vision": kept[f"{role}.vision"]}, run.job, role)
