"""Where Megatron's ranks write a rollout shard is where the rollout engine looks for it, by plans of the compiler."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_tiny import megatron_plan
from torch import Tensor

from rollplex.backends.facts import load_facts
from rollplex.backends.megatron import memory
from rollplex.backends.megatron.memory import Slab
from rollplex.backends.megatron.names import Stored, parameters
from rollplex.backends.megatron.weights import fill
from rollplex.backends.shard import Shard, shard_of
from rollplex.ir.planned_job import job_of


def written(tp: int) -> tuple[Shard, Tensor, dict[str, Tensor]]:
    """The shard of rollout rank 0 of 1, its memory with the slabs of all ranks, and what they were given."""
    plan = megatron_plan(tp)
    job, layout = job_of(plan), plan.summary.layout
    rng = torch.Generator().manual_seed(0)
    weights = {t.name: torch.randn(t.shape, generator=rng) for t in job.spec.tensors()}
    shard = shard_of(job.spec, layout, load_facts("megatron"), load_facts("host"), 1, 0)
    snapshot = torch.full((shard.numel,), float("nan"))
    for j in range(tp):
        order = [p for p in parameters(job.spec, tp, j, Stored.planned(layout)) if p.part == "language"]
        assert memory.numel(order, Slab(j, tp)) == shard.numel
        views = memory.views(snapshot, order, Slab(j, tp))
        fill(order, views, lambda p: weights[p.source].narrow(p.axis, p.start, p.stop - p.start))
    return shard, snapshot, {n.removeprefix("model.language_model."): t for n, t in weights.items()}


@pytest.mark.parametrize("tp", [1, 2])
def test_every_tensor_is_where_the_rollout_engine_reads_it(tp: int) -> None:
    """Fused weights in their parts, row-parallel ones in either form; no element is missing or left over."""
    shard, snapshot, weights = written(tp)
    assert not snapshot.isnan().any()
    parts: dict[str, list[Tensor]] = {}
    transposed = {r.name for r in shard.regions if r.transposed}
    in_place = Shard(tuple(replace(region, own=None) for region in shard.regions))
    for name, held in in_place.tensors(snapshot):
        parts.setdefault(name, []).append(held.t() if name in transposed else held)
    for name, held in parts.items():
        assert torch.equal(torch.cat(held), weights[name]), name
    assert len(parts) == len([n for n in weights if not n.startswith("model.visual.")])


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_rebuilt_has_the_engines_rows(tp: int) -> None:
    """[Q; K; V], copied from rows that lie by KV head."""
    shard, snapshot, weights = written(tp)
    buffer = torch.full((shard.buffer_numel,), float("nan"))
    shard.rebuild(snapshot, buffer)
    assert not buffer.isnan().any()
    for region in shard.rebuilt:
        leaf = region.name.rpartition(".")[2]
        layer = region.name.partition(".self_attn.")[0]
        wanted = torch.cat([weights[f"{layer}.self_attn.{part}_proj.{leaf}"] for part in "qkv"])
        assert torch.equal(region.held(snapshot, buffer), wanted), region.name


@pytest.mark.parametrize("tp", [1, 2])
def test_the_exchange_sends_each_rank_its_own_slab(tp: int) -> None:
    """Row j of what is gathered is training rank j's parameter, part by part."""
    shard, snapshot, _ = written(tp)
    plan = megatron_plan(tp)
    stored, spec = Stored.planned(plan.summary.layout), job_of(plan).spec
    gathered = [slabs for region in shard.regions for slabs in region.gathered(snapshot)]
    for j in range(tp):
        order = [p for p in parameters(spec, tp, j, stored) if p.part == "language"]
        views = memory.views(snapshot, order, Slab(j, tp))
        own = [views[p.name] for p in order if len(p.shape) > 1 or p.name.endswith("qkv.bias")]
        assert [slabs[j].data_ptr() for slabs in gathered] == [view.data_ptr() for view in own]
