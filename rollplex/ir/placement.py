"""Where a rank stands: its GPU, its part of the model, and its share of a step's prompts.

TP 2 trains, TP 1 rolls out (q = 2), 8 prompts     gpu    training rank           rollout rank
                                                    0     copy 0, tp 0, 0 .. 3    engine 0, tp 0, 0 .. 1
                                                    1     copy 0, tp 1, 0 .. 3    engine 1, tp 0, 2 .. 3
                                                    2     copy 1, tp 0, 4 .. 7    engine 2, tp 0, 4 .. 5
                                                    3     copy 1, tp 1, 4 .. 7    engine 3, tp 0, 6 .. 7

A training rank's slab lies in the shard of rollout rank tp // q, so engine e of a copy stands on its GPUs {e, e + q,
..} (paper section 3.3): the rollout rank of a GPU reads what the training rank of that GPU owns and receives.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.ir.job import Job


@dataclass(frozen=True)
class Seat:
    """One rank of a training or rollout engine on GPU `gpu` of its pool; `copy` is its replica or rollout engine.

    `prompts` are those that it trains or whose responses it hands over, by their number among all that the step takes;
    `sampled` those that it samples for, by their number among all that are sampled: the same where none is left.
    """

    gpu: int
    copy: int
    tp: int
    prompts: range
    sampled: range

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for its engine: all of its ranks know the same values."""
        return self.tp == 0


def training_seat(job: Job, rank: int) -> Seat:
    """The seat of a training rank: copy after copy, each with its tensor-parallel ranks in order."""
    copy, tp = divmod(rank, job.train_tp)
    return _seated(job, rank, copy, tp, job.data_parallel(job.policy))


def rollout_seat(job: Job, rank: int) -> Seat:
    """The seat of the rollout rank on the same GPU as training rank `rank`; of the rank-th GPU of a pool of its own."""
    if job.q:
        copy, at = divmod(rank, job.train_tp)
        tp, engine = divmod(at, job.q)
        engine += copy * job.q
    else:
        engine, tp = divmod(rank, job.rollout_tp)
    return _seated(job, rank, engine, tp, job.engines)


def seat(job: Job, kind: str, rank: int) -> Seat:
    """The seat of a rank of process kind `train` or `rollout`."""
    return (training_seat if kind == "train" else rollout_seat)(job, rank)


def peers(job: Job, rank: int) -> tuple[int, ...]:
    """The other training ranks whose slabs make up a rollout shard with this rank's, from the one behind it on.

    So ranks that write to each other at once begin at different ones.
    """
    return tuple(rank - rank % job.q + (rank + i) % job.q for i in range(1, job.q))


def cuda_device(job: Job, gpu: int) -> int:
    """The number of a GPU of the node among the CUDA devices that processes see."""
    return job.run.devices[gpu] if job.run.devices else gpu


def prompts_of_group(job: Job, group: int) -> tuple[int, ...]:
    """The prompts of a step that are the `group`-th of a data-parallel rank, rank after rank."""
    copies = range(job.data_parallel(job.policy))
    return tuple(_share(job.workload.prompts, copy, len(copies))[group] for copy in copies)


def _seated(job: Job, rank: int, copy: int, tp: int, copies: int) -> Seat:
    return Seat(rank, copy, tp, _share(job.workload.prompts, copy, copies), _share(job.sampled, copy, copies))


def _share(prompts: int, part: int, parts: int) -> range:
    """The part-th of equal shares; a job whose prompts do not divide is refused."""
    size = prompts // parts
    return range(part * size, (part + 1) * size)
