"""Oversampled and partial rollout with vLLM: which prompts, which tokens, under which weights.

One engine after the other lives in this process, so they end as they should, too.
"""

from __future__ import annotations

from typing import Any

import torch
from runtime_threads import TRAIN, InThreads
from runtime_tiny import luck
from torch import Tensor
from vllm_tiny import HOST, ROLLOUT, needs_vllm, vllm_plan

from rollplex.backends.data.rollout import Rollout
from rollplex.ir.steps import Run, Step
from rollplex.runtime.protocol import ProcessId

pytestmark = needs_vllm
torch.set_num_threads(1)
ENDS = tuple(range(0, 264, 5))
STEPS, TEMPERATURE = 3, 0.7


class Watched:
    """Three steps; of each the rollout, what the trainer gives its tokens under theta_k, and what was left."""

    def __init__(self, mode: dict[str, Any], prompts: int) -> None:
        memory = {**ROLLOUT, "kv_cache_gib": "4 MiB", "runtime_gib": "8 MiB"}
        roles = {"actor": {"train": HOST, "rollout": memory}, "reference": {"score": HOST}}
        self.rollouts: list[Rollout] = []
        self.trainers: list[Tensor] = []
        self.left: list[Rollout | None] = []
        run = {"temperature": TEMPERATURE}
        plan = vllm_plan(workload={"prompts": prompts, "rollout": mode}, roles=roles, run=run)
        assert plan.not_executable == ()
        self.run = InThreads(plan, {"reward": luck}, self._look)
        self.run.feed._eos = ENDS
        for step in range(STEPS):
            self.run.step(step)
            unfinished = self.run.rollout._unfinished
            self.left.append(unfinished.take() if unfinished else None)
        self.run.close()

    def _look(self, process: ProcessId, step: Step) -> None:
        if process == TRAIN and isinstance(step, Run) and step.task == "grad_norm":
            values = self.run.states[TRAIN].values
            self.rollouts.append(values["rollout"])
            self.trainers.append(self._logprobs(values["rollout"], values["prompts"]))

    @torch.no_grad()
    def _logprobs(self, rollout: Rollout, prompts: Any) -> Tensor:
        """Like rollout.logprobs, by the trainer; zero where there is no token."""
        found, replica = torch.zeros_like(rollout.logprobs), self.run.train._replicas["actor"]
        for place, number in enumerate(rollout.taken.tolist()):
            prompt = prompts[number]
            slot = torch.zeros(replica.boundary_shape(prompt.prefix_tokens))
            prefix = replica.prefix(prompt, slot, attached=False, saved=None, before=())
            rows = replica.logprobs(prefix, prefix.kv, rollout.responses(place), TEMPERATURE, False)
            for row, length in enumerate(rollout.lengths[place].tolist()):
                found[place, row, :length] = rows[row, :length]
        return found


def test_of_oversampled_prompts_the_first_to_complete_are_taken_under_the_weights_of_their_step() -> None:
    found = Watched({"kind": "oversample", "factor": 1.5}, prompts=4)
    assert len({tuple(r.taken.tolist()) for r in found.rollouts}) > 1
    for rollout, trainer in zip(found.rollouts, found.trainers, strict=True):
        assert len(rollout.taken) == 4
        assert (rollout.logprobs - trainer)[rollout.mask].abs().max() <= 1e-5


def test_a_partial_rollout_goes_on_where_it_stopped_and_keeps_what_it_was_sampled_with() -> None:
    """Tokens of the step have the trainer's log-probabilities now; older ones those of the step that sampled them."""
    found = Watched({"kind": "partial", "share": 0.5}, prompts=2)
    kept = 0
    for step, (rollout, trainer) in enumerate(zip(found.rollouts, found.trainers, strict=True)):
        new = rollout.versions == step + 1
        assert (rollout.logprobs - trainer)[new].abs().max() <= 1e-5
        before = found.left[step - 1] if step else None
        for tokens, logprobs, versions in zip(*(x.flatten(0, 1) for x in _three(rollout)), strict=True):
            older = int(((versions > 0) & (versions <= step)).sum())
            if older:
                assert before is not None
                assert any(
                    torch.equal(t[:older], tokens[:older]) and torch.equal(p[:older], logprobs[:older])
                    for t, p in zip(before.tokens.flatten(0, 1), before.logprobs.flatten(0, 1), strict=True)
                )
                kept += older
    assert kept > 5


def _three(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
    return rollout.tokens, rollout.logprobs, rollout.versions
