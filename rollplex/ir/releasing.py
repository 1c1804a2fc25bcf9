"""Whether the trained weights may be gone at the optimizer barrier and be made again from their FP32 masters.

not_releasable(job)     "" or why not:  `distributed_optimizer cuts master weights over the ranks: none can make all ..`

Of the policy's snapshot, of whose parameters an update writes all: each rank those it owns, its group the rest of the
rollout shard. Paper section 3.2, optimizer streaming.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

from rollplex.ir.findings import Finding
from rollplex.ir.lora import lora_of
from rollplex.ir.shards import Degrees, rank_numel
from rollplex.ir.spec import ModelSpec

if TYPE_CHECKING:
    from rollplex.ir.job import Job

KEY = ("optimizer", "snapshot")


def not_releasable(job: Job) -> str:
    """Why an update cannot write a snapshot whose pages have gone; empty where it can."""
    role, degrees = job.policy, job.degrees(job.policy)
    others = [name for name in job.trained if name != role]
    reasons = (
        ("under naive nothing is released", job.schedule == "naive"),
        ("ablate switches chunking off: the update is one chunk", "chunked_optimizer" in job.ablate),
        ("ablate keeps states in HBM", "state_offload" in job.ablate),
        (f"{role} trains adapters: nothing makes its base again", lora_of(job) is not None),
        (f"{role} freezes its language model, which has no masters", "language" in job.roles[role].freeze),
        (f"{', '.join(others)} is updated too, and may read it", bool(others)),
        ("a trainer on whole sequences updates weights that are not in chunks", job.whole_sequences(role)),
        ("master weights are cut over the ranks: none makes all of it again", job.cuts_optimizer(role)),
        ("a pipeline stage writes its own layers alone", degrees.pp > 1),
        ("an expert-parallel rank writes its own experts alone", degrees.ep > 1),
    )
    return next((why for why, holds in reasons if holds), "")


def check_release(job: Job) -> Iterator[Finding]:
    """`release` is for a snapshot that can be."""
    if job.optimizer.snapshot == "release" and (why := not_releasable(job)):
        uses = (("roles",), ("schedule",), ("ablate",))
        yield Finding(KEY, f"the snapshot cannot be released: {why}", "snapshot: auto", uses)


def stretches(job: Job) -> tuple[tuple[int, int], ...]:
    """The policy's language model in its order in memory and in the update: embedding, layers, norm, head.

    For each stretch the parameters up to its end, of a training rank and of the rollout shard that its GPU holds:
    inside of a stretch an engine orders tensors as it likes.
    """
    shared = job.shares_weights and "weight_sharing" not in job.ablate
    return _stretches(job.spec, job.degrees(job.policy), job.rollout_tp if shared else None)


@lru_cache(maxsize=64)
def _stretches(spec: ModelSpec, degrees: Degrees, rollout_tp: int | None) -> tuple[tuple[int, int], ...]:
    """Of a rollout shard, or of the trainer's own copy."""
    own = shared = 0
    found = []
    language = (t for t in spec.tensors() if t.part == "language")
    for _, tensors in groupby(language, key=lambda t: t.name if t.layer is None else t.layer):
        for tensor in tensors:
            mine = rank_numel(spec, tensor, degrees)
            own += mine
            shared += spec.shard_numel(tensor, rollout_tp) if rollout_tp else mine
        found.append((own, shared))
    return tuple(found)
