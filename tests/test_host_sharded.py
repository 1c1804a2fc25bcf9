"""Rollout ranks over shards that training ranks filled: every layout case gives what transformers gives whole.

TP 4 trains, TP 2 rolls out     snapshot of rollout rank 0   |embed0 embed1|qkv0 qkv1| ..     written slab by slab
                                read by its engine           in the order the plan says, without a copy but case 3
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from host_tiny import CONFIG, IMAGE, oracle_model, text_prompt, tied, video_prompt, whole_logprobs
from runtime_tiny import tiny_job
from torch import Tensor

from examples.grpo import grpo
from rollplex.backends.collectives import Groups
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.facts import load_facts
from rollplex.backends.hf.precision import KeepDouble
from rollplex.backends.host.rollout import Decoding
from rollplex.backends.host.sharded import sharded_model
from rollplex.backends.shard import Shard, shard_of
from rollplex.ir.errors import RunError
from rollplex.ir.job import Job
from rollplex.ir.models import spec_from_config
from rollplex.ir.plan import Plan
from rollplex.passes.pipeline import compile_plan

TEXT = {**CONFIG["text_config"], "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
TEXT |= {"vocab_size": 64, "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [1, 1, 2]}}
MODEL = {**CONFIG, "text_config": TEXT, "vision_config": {**CONFIG["vision_config"], "out_hidden_size": 64}}
EOS = (7, 9)


class InThreads(Groups):
    """Ranks as threads of this process: a collective leaves its values on a board that all ranks read."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, {"tp": tuple(range(len(board)))})
        object.__setattr__(self, "board", board)
        object.__setattr__(self, "barrier", barrier)

    def all_reduce(self, name: str, values: Tensor) -> None:
        values.copy_(torch.stack(self._all(values.clone())).sum(0))

    def all_gather(self, name: str, values: Tensor) -> Tensor:
        return torch.cat(self._all(values), dim=-1)

    def _all(self, value: Tensor) -> list[Tensor]:
        self.board[self.rank] = value  # pyright: ignore[reportAttributeAccessIssue]
        self.barrier.wait()  # pyright: ignore[reportAttributeAccessIssue]
        found = list(self.board)  # pyright: ignore[reportAttributeAccessIssue]
        self.barrier.wait()  # pyright: ignore[reportAttributeAccessIssue]
        return found


@dataclass(frozen=True)
class Case:
    """Degrees and row order; `views` are what the plan must have chosen for the classes that matter."""

    train: int
    rollout: int
    order: str
    views: Mapping[str, str]
    tied: bool = False
    config: Mapping[str, Any] = field(default_factory=lambda: MODEL)

    def __str__(self) -> str:
        return f"{self.train} to {self.rollout} {self.order}{' tied' if self.tied else ''}"


REBUILT = {"qkv": "rebuild", "o": "transpose", "gate_up": "slabs", "down": "transpose", "embed": "alias"}
REINDEXED = {**REBUILT, "qkv": "reindex", "gate_up": "interleave"}
SAME = dict.fromkeys(("o", "gate_up", "down", "embed"), "alias")
CASES = [
    Case(1, 1, "stock", {**SAME, "qkv": "rebuild"}),
    Case(1, 1, "reindex", {**SAME, "qkv": "reindex"}),
    Case(2, 2, "stock", {**SAME, "qkv": "rebuild"}),
    Case(2, 1, "stock", REBUILT),
    Case(2, 1, "reindex", REINDEXED, tied=True),
    Case(4, 2, "stock", REBUILT, tied=True),
    Case(4, 2, "reindex", REINDEXED),
    Case(4, 1, "reindex", REINDEXED),
]


@cache
def plan_of(train: int, rollout: int, order: str, is_tied: bool) -> Plan:
    config = tied(MODEL) if is_tied else MODEL
    trainer = {"engine": "megatron", "tensor_parallel": train, "sequence_parallel": False}
    roles = {
        "actor": {
            "train": trainer,
            "rollout": {"engine": "host", "tensor_parallel": rollout, "kv_cache_gib": "8 MiB", "runtime_gib": "1 MiB"},
        },
        "reference": {"score": trainer},
    }
    job = tiny_job(
        model={"name": "tiny", "config": config, "dtype": "float64"},
        cluster={"gpus_per_node": train, "capacity_gib": 1},
        workload={"prompts": 4},
        roles=roles,
        layout={"order": order},
    )
    return compile_plan(grpo, job)


# ---- the trainer's side, by reshaping whole tensors


def trained(weights: Mapping[str, Tensor], name: str, rank: int, tp: int, transposed: bool) -> list[Tensor]:
    """What a Megatron rank holds of a region: one tensor, or gate and up."""
    full = f"model.language_model.{name}"
    if name in ("embed_tokens.weight", "lm_head.weight"):
        return [weights["lm_head.weight" if name.startswith("lm_head") else full].chunk(tp)[rank]]
    base, _, leaf = full.rpartition(".")
    if base.endswith("qkv"):
        return [grouped_qkv(weights, base.removesuffix("qkv"), leaf).chunk(tp)[rank]]
    if base.endswith("gate_up"):
        parts = (weights[f"{base.removesuffix('gate_up')}{part}_proj.weight"] for part in ("gate", "up"))
        return [part.chunk(tp)[rank] for part in parts]
    if base.endswith(("o_proj", "down_proj")):
        columns = weights[full].chunk(tp, dim=1)[rank]
        return [columns.t() if transposed else columns]
    return [weights[full]]


def grouped_qkv(weights: Mapping[str, Tensor], prefix: str, leaf: str) -> Tensor:
    """Megatron's rows: of every KV group its query heads, its key head, its value head."""
    q, k, v = (weights[f"{prefix}{part}_proj.{leaf}"] for part in "qkv")
    groups = TEXT["num_key_value_heads"]
    return torch.cat([x.unflatten(0, (groups, -1)) for x in (q, k, v)], dim=1).flatten(0, 1)


def filled(shard: Shard, weights: Mapping[str, Tensor], rank: int, tp: int, q: int) -> Tensor:
    """A snapshot in which training rank after training rank has written its slabs, and nothing else."""
    snapshot = torch.full((shard.numel,), float("nan"), dtype=torch.float64)
    for j in range(q):
        for region in shard.regions:
            held = trained(weights, region.name, rank * q + j, tp, region.transposed)
            if region.axis is None:
                snapshot[region.start : region.stop] = held[0].flatten()
                continue
            pieces = held if region.parts > 1 else [torch.cat(held)]
            for slabs, piece in zip(region.gathered(snapshot), pieces, strict=True):
                slabs[j] = piece.flatten()
    return snapshot


def ranks_of(case: Case, model: Any, run: Callable[[Any], Any]) -> list[Any]:
    """What `run(model of a rank)` gives on every rollout rank, run as threads."""
    plan = plan_of(case.train, case.rollout, case.order, case.tied)
    job, layout = Job.model_validate(plan.job), plan.summary.layout
    assert {name: view for name, view in ((c.name, c.view) for c in layout.classes) if name in case.views} == case.views
    weights = {name: p.detach() for name, p in model.named_parameters()}
    tower = {name: view for name, view in weights.items() if name.startswith("model.visual.")}
    barrier, board = threading.Barrier(case.rollout), [None] * case.rollout
    results: list[Any] = [None] * case.rollout

    def rank(r: int) -> None:
        try:
            trainer, roller = load_facts("megatron"), load_facts("host")
            shard = shard_of(job.spec, layout, trainer, roller, case.rollout, r)
            snapshot = filled(shard, weights, r, case.train, layout.q)
            buffer = torch.full((shard.buffer_numel,), float("nan"), dtype=torch.float64)
            shard.rebuild(snapshot, buffer)
            assert not snapshot.isnan().any()
            assert not buffer.isnan().any()
            assert shard.numel == job.spec.rank_parameters(case.rollout, "language")
            assert shard.buffer_numel * 8 == layout.case3_buffer_bytes
            groups = InThreads(r, board, barrier)
            results[r] = run(sharded_model(dict(job.model.config or {}), shard, snapshot, buffer, tower, groups))
        except BaseException as err:
            results[r] = err
            barrier.abort()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(case.rollout)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_ranks_sample_together_has_the_log_probabilities_of_the_whole_model(case: Case) -> None:
    """Every case of the paper's section 3.3, with what its plan chose; the log-probabilities come from transformers."""
    model = oracle_model(tied(MODEL) if case.tied else MODEL, torch.float64)
    prompts = [video_prompt(model), text_prompt(5)]

    def sample(rank: Any) -> Rollout:
        heads = TEXT["num_key_value_heads"] // case.rollout
        kv = torch.full((200_000 * heads,), float("nan"), dtype=torch.float64)
        dice = [torch.Generator().manual_seed(3 + i) for i in range(len(prompts))]
        return Decoding(rank, prompts, 4, 9, 0.8, dice, kv, eos=EOS, tp=case.rollout).until(range(len(prompts)))

    found = ranks_of(case, model, sample)
    for other in found[1:]:
        assert other.same_as(found[0])
    compared = 0
    for i, prompt in enumerate(prompts):
        for row, got in zip(found[0].responses(i), found[0].logprobs[i], strict=True):
            if (row < IMAGE).all():  # transformers takes a sampled video token for one of the prompt's
                with KeepDouble(), torch.no_grad():
                    wanted = whole_logprobs(model, prompt, row, 0.8)
                assert (got[: len(row)] - wanted).abs().max() < 1e-10
                compared += 1
    assert compared >= 5


def test_rows_that_no_training_rank_of_the_shard_holds_are_refused() -> None:
    """Four KV heads over eight rollout ranks: each head is read twice and held once."""
    spec = spec_from_config(MODEL, "tiny")
    layout = plan_of(4, 2, "stock", False).summary.layout.model_copy(update={"q": 1})
    with pytest.raises(RunError, match=r"rollout rank 0 of 8 reads qkv rows that its 1 training ranks lack"):
        shard_of(spec, layout, load_facts("megatron"), load_facts("host"), 8, 0)
