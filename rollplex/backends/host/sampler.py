"""The host's sampler: transformers' layers over the shard, decoded with a KV cache in the plan's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollplex.backends.collectives import Groups
from rollplex.backends.data.batch import PromptBatch
from rollplex.backends.data.histories import Histories
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.host.rollout import Decoding
from rollplex.backends.host.sharded import sharded_model
from rollplex.backends.host.trajectories import Sampling, Trajectories, rows_of
from rollplex.backends.rollout.sampler import Served
from rollplex.backends.training.placement import config_of
from rollplex.ir.job import Job


class HostSampler:
    """`Sampler` of one rank. Nothing outlives a rollout: keys and values are made anew for each."""

    def __init__(self, job: Job, served: Served, groups: Groups) -> None:
        self._job, self._groups = job, groups
        self.model = sharded_model(config_of(job), served.shard, served.snapshot, served.buffer, served.tower, groups)
        self._kv, self._live = served.kv.view(served.snapshot.dtype), served.live
        self.dice: list[torch.Generator] = []
        self._trajectories: Trajectories | None = None

    def ready(self) -> None:
        """Parameters are views of addresses that stay: nothing is made of the pages behind them."""

    def begin(self, seeds: Sequence[int]) -> None:
        self.dice = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._trajectories = None

    def decoding(self, prompts: PromptBatch, begun: Rollout | None, version: int) -> Decoding:
        job = self._job
        return Decoding(
            self.model,
            prompts.prompts,
            job.group,
            job.workload.response_tokens,
            job.run.temperature,
            self.dice,
            self._kv,
            eos=prompts.eos,
            tp=job.rollout_tp,
            begun=begun,
            version=version,
            on_step=lambda step, live: self._live(live, step),
        )

    def turn(self, prompts: PromptBatch | Histories, version: int) -> Rollout:
        if isinstance(prompts, Histories):
            assert self._trajectories is not None, "a history follows the prompts of its step"
            return self._trajectories.turn(rows_of(prompts), self.dice, version)
        job, every, load = self._job, prompts.prompts, self._job.workload
        sampling = Sampling(job.group, load.response_tokens, job.run.temperature, prompts.eos)
        own = load.trajectory_tokens - load.prompt_tokens
        self._trajectories = Trajectories.begin(self.model, every, sampling, own, self._kv, job.rollout_tp)
        return self._trajectories.turn([p for p in every for _ in range(job.group)], self.dice, version)

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._groups.close()
