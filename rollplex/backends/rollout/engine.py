"""The rollout rank of a plan: it samples with a KV cache from the very pages that the training rank writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollplex.backends.carried import Carried
from rollplex.backends.collectives import Pair
from rollplex.backends.data.batch import PromptBatch
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.device import device_of
from rollplex.backends.digest import digest
from rollplex.backends.engine import EngineReport, TrainedState, Values
from rollplex.backends.facts import load_facts
from rollplex.backends.live import FULL, LiveBatch
from rollplex.backends.memory.planned import PlannedObjects
from rollplex.backends.publication import Subscription
from rollplex.backends.rollout.rounds import SampledRounds
from rollplex.backends.rollout.sampler import Decoding, Sampler, Served
from rollplex.backends.rollout.unfinished import Unfinished
from rollplex.backends.shard import shard_of
from rollplex.backends.training.carrying import CarriedObjects
from rollplex.backends.training.placement import DTYPES, split, tensors_of
from rollplex.backends.training.refresh import REFRESH, Copies, copies
from rollplex.ir.job import Job
from rollplex.ir.parts import group_of, round_of
from rollplex.ir.placement import Seat, prompts_of_group
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange, Rebuild, Run

KV, CARRIED = "rollout.kv", "rollout.carried"


class RolloutEngine:
    """`Engine` of a rollout rank; its weights are imported, read-only: a copy of its own only where a plan says so."""

    def __init__(
        self,
        plan: Plan,
        job: Job,
        seat: Seat,
        pair: Pair,
        process: str,
        fds: Sequence[int],
        make: Callable[[Served], Sampler],
        live: LiveBatch,
    ) -> None:
        self.job = job
        self.dtype = DTYPES[job.model.dtype]
        self._owner = f"train {process.rpartition(' ')[2]}"
        self._objects = PlannedObjects(plan, "rollout", process, fds, device_of(job, seat.gpu))
        self._copies = Copies(pair, self._objects, copies(plan, job.policy, "rollout"))
        self._live = live
        self.sampler = make(self._served(plan, seat))
        self._seat = seat
        self._decoding: Decoding | None = None
        self._seconds = 0.0
        self._carried = CarriedObjects(job, self._objects)
        self._unfinished = self._room_for_unfinished()
        self._version = 0
        self._rounds = SampledRounds()
        self._sampled: str = ""
        self._begun = 0
        self._published: Subscription | None = None
        self._done: list[tuple[int, int, int, float]] = []
        self._objects.start()

    @property
    def objects(self) -> PlannedObjects:
        return self._objects

    def export(self) -> dict[str, list[int]]:
        return self._objects.export()

    def owners(self, name: str) -> tuple[int, ...]:
        return (self._seat.gpu,) if name in self._objects.imported else ()

    def adopt(self, name: str, owner: int, fds: Sequence[int], step: str) -> None:
        """Behind the pages of the snapshot comes that of its stamp, the first time."""
        if name == f"{self.job.policy}.snapshot" and self._published is None:
            *fds, stamp = fds
            self._published = Subscription(stamp, self._owner, self._objects.shared_digest)
        self._objects.adopt(name, fds, self._owner, step)

    def let_go(self, name: str, step: str) -> None:
        self._objects.unmap(name, step)

    def ready(self) -> dict[str, Any]:
        self._copies.begin()
        with self._objects.lent(KV):  # an engine's caches are set up in it, graphs are captured over it
            self.sampler.ready()
        self._objects.device.trim()
        self._live.tell(FULL)
        return {"inodes": self._objects.inodes()}

    def trained(self) -> dict[str, TrainedState]:
        return {}

    def begin(self, iteration: int) -> None:
        """New weights are due, and what was made of the old ones must go."""
        self._begun += 1
        self._version = iteration + 1
        self.sampler.begin([self._seed(prompt, 0) for prompt in self._seat.sampled])
        self._rounds = SampledRounds()
        self._done.clear()

    def may_begin(self, step: Run) -> bool:
        return True

    def run(self, step: Run, inputs: Mapping[str, Any]) -> Values:
        assert step.task == "generate", f"{step.task} is no task of a rollout rank"
        (prompts,) = (inputs[name] for name in step.inputs)
        (made,) = step.outputs
        started = time.monotonic()
        # A copy of its own has no other writer: this rank enters the exchange that refreshes it.
        with self._published.readable(self._begun - 1) if self._published else nullcontext():
            if self.job.workload.turns is not None:
                rollout = self.sampler.turn(prompts.of(self._seat.prompts), self._version)
                self._note(rollout, time.monotonic() - started)
                return {made: self._sent(rollout)}
            if self.job.workload.dynamic_sampling is not None:
                return {made: self._sent(self._round(step, prompts))}
            if self._decoding is None:
                self._decoding, self._seconds = self._begin(prompts.of(self._seat.sampled)), 0.0
            rollout = self._awaited(self._decoding, group_of(made))
        self._seconds += time.monotonic() - started
        if group_of(made) in (None, self.job.prompts_per_rank - 1):
            self._note(rollout if group_of(made) is None else self._decoding.until(self._wanted(None)), self._seconds)
            self._decoding = None
        return {made: self._sent(rollout)}

    def exchange(self, step: Exchange) -> None:
        assert step.group == REFRESH, "training ranks exchange weights"
        self._copies.copy(step.object, step.nbytes)

    def scale(self, step: Run, inputs: Mapping[str, Any]) -> float:
        raise AssertionError("a rollout rank has no gradients")

    def rebuild(self, step: Rebuild) -> None:
        raise AssertionError("the training rank of the GPU rebuilds")

    def finish(self) -> EngineReport:
        self._objects.measuring = False
        self._live.tell(FULL)  # the next step begins on both sides at once
        return EngineReport(self._metrics(), {}, *self._objects.take_logs())

    def carried(self) -> Carried:
        found = self._carried.carried()
        return replace(found, facts={**found.facts, "sampled": self._sampled})

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self._carried.restore(tensors, facts)
        self._sampled = facts["sampled"]

    def save(self, path: Path) -> None:
        raise AssertionError("the training rank saves")

    def digests(self) -> dict[str, str]:
        return {"rollouts": self._sampled}

    def close(self) -> None:
        self._objects.close()
        if self._published is not None:
            self._published.close()
        self.sampler.close()
        self._live.close()

    def _served(self, plan: Plan, seat: Seat) -> Served:
        """The rank's weights over pages that the training rank of its GPU owns, or over its own copy of them."""
        job, role, pages = self.job, self.job.policy, self._objects
        trainer, own = load_facts(job.trainer(role).engine), load_facts(plan.processes["rollout"].engine)
        shard = shard_of(job.spec, plan.summary.layout, trainer, own, job.rollout_tp, seat.tp)
        buffer = pages.pages(f"{role}.case3", self.dtype) if shard.rebuilt else None
        own = pages.has("rollout.weights")
        weights, vision = ("rollout.weights", "rollout.vision") if own else (f"{role}.snapshot", f"{role}.vision")
        tower = split(pages.pages(vision, self.dtype), tensors_of(job, role, "vision"))
        snapshot, kv = pages.pages(weights, self.dtype), pages.pages(KV, torch.uint8)
        return Served(shard, snapshot, buffer, tower, kv, self._live.tell)

    def _awaited(self, decoding: Decoding, group: int | None) -> Rollout:
        """The responses that a step waits for: to all prompts or one group's, or to the first prompts to complete."""
        if len(self._seat.sampled) == len(self._seat.prompts):
            return decoding.until(self._wanted(group))
        taken, left = decoding.first(len(self._seat.prompts))
        if self._unfinished is not None:
            self._unfinished.put(left)
        return taken

    def _wanted(self, group: int | None) -> list[int]:
        """Which of the engine's prompts are of a group of the training ranks, by their places here; all, for none."""
        own = self._seat.prompts
        return [p - own.start for p in (own if group is None else prompts_of_group(self.job, group)) if p in own]

    def _room_for_unfinished(self) -> Unfinished | None:
        """The plan's object for responses that go on in the next step, where there are any."""
        if not self._objects.has(CARRIED):
            return None
        left = len(self._seat.sampled) - len(self._seat.prompts)
        memory = self._objects.slot(CARRIED, torch.uint8)
        self._objects.filled(CARRIED)
        return Unfinished(memory, left, self.job.group, self.job.workload.response_tokens)

    def _round(self, step: Run, prompts: PromptBatch) -> Rollout:
        """The responses that a round is for; of the last one those of the whole step."""
        started, number, own = time.monotonic(), step.microbatch, self._seat.sampled
        due = prompts.sampled_for(own)
        if not due:
            fresh = self._rounds.none()
        else:
            if number:
                self.sampler.begin([self._seed(prompt, number) for prompt in due])
            decoding = self._begin(prompts.take(torch.tensor(due)))
            fresh = self._rounds.take(decoding.until(range(len(due))), [p - own.start for p in due])
            self._note(fresh, time.monotonic() - started)
        return self._rounds.all() if round_of(step.outputs[0]) is None else fresh

    def _seed(self, prompt: int, number: int) -> int:
        """What a prompt of the step samples with, in each of its rounds."""
        first = _mixed(_mixed(self.job.run.seed, self._version - 1), prompt)
        return _mixed(first, number) if number else first

    def _begin(self, prompts: PromptBatch) -> Decoding:
        return self.sampler.decoding(prompts, self._unfinished and self._unfinished.take(), self._version)

    def _sent(self, rollout: Rollout) -> Rollout:
        losses = torch.float64 if self.dtype == torch.float64 else torch.float32
        return replace(rollout, logprobs=rollout.logprobs.to(losses), taken=rollout.taken + self._seat.sampled.start)

    def _note(self, sampled: Rollout, seconds: float) -> None:
        """Metrics and digest of all responses of a turn, whether or not they left group by group: none decodes now."""
        self._live.tell(0)
        rollout = self._sent(sampled)
        older = rollout.versions[rollout.mask] < self._version
        self._done.append((int(rollout.lengths.sum()), int(older.sum()), rollout.lengths.numel(), seconds))
        state = torch.tensor(list(self._sampled.encode()), dtype=torch.uint8)
        self._sampled = digest(
            state, rollout.tokens, rollout.lengths, rollout.logprobs, rollout.taken, rollout.versions
        )

    def _metrics(self) -> dict[str, float]:
        """Of all turns of the step."""
        tokens, older, responses, seconds = (sum(column) for column in zip(*self._done, strict=True))
        found = {"response_tokens": tokens / responses, "rollout_tokens_per_s": tokens / max(seconds, 1e-9)}
        found |= self.sampler.metrics()
        return found | ({"older_tokens": older / tokens} if self._unfinished else {})  # that other weights sampled


def _mixed(seed: int, number: int) -> int:
    """A seed for one iteration or prompt, far from those of its neighbours (splitmix64)."""
    x = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) % 2**63
