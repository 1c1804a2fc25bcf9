"""Whether adapters can be trained and served as a job asks, before anything is planned.

job.yaml:14: rank 12 is not divided by tensor_parallel 8: every rank holds a part of A's rows
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollplex.ir.engines import engine
from rollplex.ir.findings import Finding, KeyPath
from rollplex.ir.lora import adapter_ranks, lora_of, merges, trained_spec

if TYPE_CHECKING:
    from rollplex.ir.job import Job


def lora_rules(job: Job) -> Iterator[Finding]:
    """What is wrong with the `lora` sections of a job."""
    for name, role in job.roles.items():
        here: KeyPath = ("roles", name, "lora")
        if role.lora is None:
            continue
        if name != job.policy:
            what = f"adapters of `{name}`: only the policy, here `{job.policy}`, is trained through adapters"
            yield Finding(here, what, "leave it out")
        elif "language" in role.freeze:
            what = "the adapters are the language model's, and freeze says that it is not trained"
            yield Finding(("roles", name, "freeze"), what, "freeze: [vision]", (here,))
        elif job.on_host:
            what = "engine host has no lora: it trains whole weights"
            yield Finding(here, what, "leave it out", (("cluster", "gpu"),))
        else:
            yield from _rank(job, here)
            yield from _served(job, here)


def _rank(job: Job, here: KeyPath) -> Iterator[Finding]:
    """Fewer rows than the model is wide, and whole ones for every rank of the trainer."""
    lora, tp, spec = lora_of(job), job.train_tp, trained_spec(job, job.policy)
    assert lora is not None
    uses: tuple[KeyPath, ...] = (("roles", job.policy, "train", "tensor_parallel"), ("model",))
    cut = next((t for t in spec.tensors() if t.axis is not None and t.shape[t.axis] % tp), None)
    if lora.rank >= spec.hidden:
        what = f"rank {lora.rank} is no low rank: {spec.name} has a hidden size of {spec.hidden}"
        yield Finding((*here, "rank"), what, "a smaller rank", (("model",),))
    elif lora.rank % tp:
        what = f"rank {lora.rank} is not divided by tensor_parallel {tp}: every rank holds a part of A's rows"
        yield Finding((*here, "rank"), what, f"rank {-(-lora.rank // tp) * tp}", uses)
    elif cut:
        what = f"tensor_parallel {tp} does not divide {cut.name}, which is {' x '.join(map(str, cut.shape))}"
        yield Finding((*here, "targets"), what, "other targets, or another tensor_parallel", uses)


def _served(job: Job, here: KeyPath) -> Iterator[Finding]:
    """A rank that the rollout engine makes room for, and rows in the order that its LoRA adds to."""
    lora, rollout = lora_of(job), job.roles[job.policy].rollout
    assert lora is not None
    assert rollout is not None
    if merges(job):
        if "weight_sharing" in job.ablate:
            what = "ablate has weight_sharing, but with adapters served merged no weights are shared"
            yield Finding(("ablate",), what, "served: adapter", ((*here, "served"),))
        return
    where: KeyPath = ("roles", job.policy, "rollout", "engine")
    ranks = adapter_ranks(rollout.engine)
    if ranks and lora.rank > max(ranks):
        what = f"{rollout.engine} serves adapters of rank {max(ranks)} at most, this has {lora.rank}"
        yield Finding((*here, "rank"), what, "a smaller rank, or served: merged", (where, (*here, "served")))
    reordered = [t for t in lora.targets if t in engine(rollout.engine).reindexes]
    if job.layout.order == "reindex" and reordered:
        what = f"order reindex, but {rollout.engine}'s LoRA adds to {' and '.join(reordered)} in its own row order"
        hint = "order: stock or auto, other lora.targets, or served: merged"
        yield Finding(("layout", "order"), what, hint, (here, where))
