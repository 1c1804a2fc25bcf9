"""The combinations of trainer, degrees, layout and algorithm that one suite of contracts is run for.

trainer   TP   cut     DP   order    head    vocab    tower    clip   update   decays   dtype    saved     algorithm
--------  ---  ------  ---  -------  ------  -------  -------  -----  -------  -------  -------  --------  ---------
host      1-1          1    stock    untied  264      trained  yes    whole    all      float64  host      gspo
host      1-1          2    stock    tied    264      frozen   no     whole    all      float32  hbm       grpo
host      1-1          2    stock    untied  264      trained  yes    shares   matrices float64  host      ppo
host      1-1          2    stock    untied  264      trained  yes    shares   all      float64  dropped   reinforce_pp
host      1-1          2    stock    untied  264      trained  yes    pieces   all      float64  host      ppo
megatron  1-1          1    stock    tied    padded   trained  yes    whole    all      float64  dropped   grpo
megatron  1-1          2    reindex  untied  padded   trained  no     shares   all      float32  host      rloo
megatron  2-1          1    stock    untied  padded   frozen   no     whole    all      float64  host      grpo
megatron  2-1  tokens  2    reindex  tied    padded   trained  yes    shares   all      float64  hbm       gspo
megatron  2-2  tokens  1    stock    untied  as is    trained  yes    whole    all      float32  dropped   grpo
megatron  4-2  tokens  1    stock    tied    padded   trained  yes    whole    matrices float64  host      grpo
megatron  4-2          1    reindex  untied  padded   frozen   yes    whole    all      float32  hbm       dapo
megatron  4-1          1    stock    untied  padded   trained  no     whole    all      float64  host      grpo
megatron  2-1          1    stock    tied    padded   trained  yes    pieces   all      float64  host      grpo
megatron  2-1  tokens  2    stock    untied  padded   trained  yes    both     all      float32  host      grpo
with vLLM as the rollout engine:
host      1-1          1    stock    tied    264      trained  yes    whole    all      float32  host      grpo
megatron  1-1          1    stock    untied  padded   trained  yes    whole    all      float32  hbm       grpo
megatron  2-1          1    stock    untied  padded   trained  yes    whole    all      float32  dropped   grpo
megatron  2-1          1    reindex  tied    padded   trained  yes    whole    all      float32  host      grpo
megatron  2-2          1    reindex  untied  as is    trained  yes    whole    all      float32  host      grpo
with a snapshot whose pages are released for the update, beside the host's rollout engine and vLLM:
megatron  2-1          1    stock    untied  padded   trained  yes    whole    all      float64  host      grpo
megatron  2-1          1    stock    untied  padded   trained  yes    whole    all      float32  host      grpo

Every value of every column is there, and every pair that meets in one mechanism: TP x order x case (1 where degrees are
equal, 2 where training is cut finer, 3 for QKV in stock order), TP x DP x shares, tied x padded, frozen x clipping
(whose norm leaves the tower out), shares x several trained roles, shares and TP x parameters that decay, dtype x TP,
sequence parallelism (`cut: tokens`) x TP x recomputation x shares. Where an update has no room for gradients, they
leave in pieces (`update: pieces`, `both` with shares), at the least memory: x several trained roles, x TP; their
prompts are short, so that the update is what has least room.
`reinforce_pp` mixes the prompts of all ranks, so it has no `streamed`. The model that vLLM rolls out is wider: it has
attention for heads of 32 and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from capacities import smallest
from runtime_tiny import CONFIG, SHORT, tiny_job
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from vllm_tiny import VL

from rollplex.ir.job import Job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run
from rollplex.passes.pipeline import compile_plan

SCHEDULES = ("serial", "rollplex", "streamed")
STEPS = 2
BOUND = {"float64": 1e-10, "float32": 1e-5}
HOST_MEMORY = {"kv_cache_gib": "1 MiB", "runtime_gib": "512 KiB"}
LITTLE_MEMORY = {"kv_cache_gib": "384 KiB", "runtime_gib": "128 KiB"}
GROUP = 2
AS_IS = 512
"""A vocabulary that Megatron pads at no degree here."""


@dataclass(frozen=True)
class Combination:
    """A line of the table above."""

    trainer: str
    train: int = 1
    rollout: int = 1
    copies: int = 1
    order: str = "stock"
    tied: bool = False
    vocab: int = 264
    frozen: bool = False
    clip: bool = True
    shares: bool = False
    tokens: bool = False
    matrices: bool = False
    dtype: str = "float64"
    saved: str = "host"
    algorithm: str = "grpo"
    roller: str = "host"
    pieces: bool = False
    released: bool = False

    def __str__(self) -> str:
        roller = "" if self.roller == "host" else f" {self.roller}"
        degrees = f"{self.trainer}{roller} {self.train}-{self.rollout} x{self.copies} {self.order}"
        named = {"tied": self.tied, "frozen": self.frozen, "unclipped": not self.clip, "shares": self.shares}
        named |= {"tokens": self.tokens, "matrices": self.matrices, "pieces": self.pieces, "released": self.released}
        return " ".join([degrees, *(name for name, on in named.items() if on), self.dtype, self.saved, self.algorithm])

    @property
    def gpus(self) -> int:
        return self.train * self.copies

    @property
    def schedules(self) -> tuple[str, ...]:
        """Not all are there for all: the update of a share has room for gradients wherever the stream has."""
        return SCHEDULES[:2] if self.algorithm == "reinforce_pp" or (self.pieces and self.shares) else SCHEDULES

    @property
    def memory(self) -> dict[str, str]:
        """KV cache and buffers of the rollout engine."""
        if self.roller == "vllm":
            return {"kv_cache_gib": "4 MiB", "runtime_gib": "8 MiB"}
        return LITTLE_MEMORY if self.pieces else HOST_MEMORY

    @property
    def config(self) -> dict[str, Any]:
        """Two KV heads a rollout rank: with one its rows would lie as the trainer has them, whatever the order."""
        heads = 2 if self.train == 1 else 4
        model = VL if self.roller == "vllm" else CONFIG
        return {**model, "num_key_value_heads": heads, "tie_word_embeddings": self.tied, "vocab_size": self.vocab}


COMBINATIONS = (
    Combination("host", algorithm="gspo"),
    Combination("host", copies=2, tied=True, frozen=True, clip=False, dtype="float32", saved="hbm"),
    Combination("host", copies=2, shares=True, matrices=True, algorithm="ppo"),
    Combination("host", copies=2, shares=True, saved="dropped", algorithm="reinforce_pp"),
    Combination("host", copies=2, pieces=True, algorithm="ppo"),
    Combination("megatron", tied=True, saved="dropped"),
    Combination("megatron", copies=2, order="reindex", clip=False, shares=True, dtype="float32", algorithm="rloo"),
    Combination("megatron", 2, 1, frozen=True, clip=False),
    Combination(
        "megatron", 2, 1, copies=2, order="reindex", tied=True, shares=True, tokens=True, saved="hbm", algorithm="gspo"
    ),
    Combination("megatron", 2, 2, vocab=AS_IS, tokens=True, dtype="float32", saved="dropped"),
    Combination("megatron", 4, 2, tied=True, tokens=True, matrices=True),
    Combination("megatron", 4, 2, order="reindex", frozen=True, dtype="float32", saved="hbm", algorithm="dapo"),
    Combination("megatron", 4, 1, clip=False),
    Combination("megatron", 2, 1, tied=True, pieces=True),
    Combination("megatron", 2, 1, copies=2, shares=True, tokens=True, pieces=True, dtype="float32"),
    *(
        Combination(
            trainer, train, rollout, order=order, tied=tied, dtype="float32", saved=saved, vocab=vocab, roller="vllm"
        )
        for trainer, train, rollout, order, tied, saved, vocab in (
            ("host", 1, 1, "stock", True, "host", 264),
            ("megatron", 1, 1, "stock", False, "hbm", 264),
            ("megatron", 2, 1, "stock", False, "dropped", 264),
            ("megatron", 2, 1, "reindex", True, "host", 264),
            ("megatron", 2, 2, "reindex", False, "host", AS_IS),
        )
    ),
    Combination("megatron", 2, 1, released=True),
    Combination("megatron", 2, 1, dtype="float32", roller="vllm", released=True),
)


@cache
def weights(of: Combination) -> Path:
    """Where training begins: transformers' model with weights large enough that every part matters, at any width."""
    torch.manual_seed(0)
    spread = 0.15 * (CONFIG["hidden_size"] / of.config["hidden_size"]) ** 0.5
    model: Any = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_dict(dict(of.config)))
    model.to(getattr(torch, of.dtype))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=p.dtype) * spread + (1.0 if p.dim() == 1 and p.mean() > 0.5 else 0.0))
    folder = Path(mkdtemp(prefix="rollplex-test-")) / "weights"
    model.save_pretrained(folder)
    return folder


@cache
def plan_of(of: Combination, schedule: str) -> Plan:
    """The plan; where gradients leave in pieces, for the least memory in which they do and groups are whole."""
    algorithm = load_algorithm(f"examples/{of.algorithm}.py")
    if not of.pieces:
        return compile_plan(algorithm, job_of(of, schedule, f"{64 << 10} KiB"))
    return smallest(algorithm, lambda capacity: job_of(of, schedule, capacity), 1 << 10, _leaving)


def _leaving(plan: Plan) -> bool:
    """Whether gradients of all roles leave in pieces; a group that is trained on in parts has other bits."""
    roles = {step.role for step in plan.programs["train"] if isinstance(step, Run) and step.offloads}
    return roles == set(plan.losses) and plan.summary.chunks.microbatch.suffix_responses == GROUP


def job_of(of: Combination, schedule: str, capacity: str) -> Job:
    """Two steps, a checkpoint behind each: of the first one a test reads the moments, which are the gradient's."""
    cut = {"sequence_parallel": of.tokens} if of.trainer == "megatron" else {}
    train = {"engine": of.trainer, "tensor_parallel": of.train, "distributed_optimizer": of.shares, **cut}
    rollout = {"engine": of.roller, "tensor_parallel": of.rollout, **of.memory}
    own = {"prefix_saved": of.saved, "recompute": "full" if of.saved == "dropped" else "none"}
    actor = {"train": train, "rollout": rollout, **own, "freeze": ["vision"] if of.frozen else []}
    scored = {"reference": {"score": {k: v for k, v in train.items() if k != "distributed_optimizer"}}}
    others = {**({"critic": {"train": train}} if of.algorithm == "ppo" else {}), **scored}
    job = tiny_job(
        schedule=schedule,
        layout={"order": of.order},
        model={"dtype": of.dtype, "config": of.config},
        cluster={"gpus_per_node": of.gpus, "capacity_gib": capacity},
        workload={"prompts": 4, "group": GROUP, "response_tokens": 8, **(SHORT if of.pieces else {})},
        optimizer={
            "lr": 1e-2,
            "eps": 1e-4,
            "weight_decay": 0.1,
            "clip_norm": 0.5 if of.clip else None,
            "no_decay": ["*.bias", "*norm*"] if of.matrices else [],
            "chunks": 8 if of.released else 1 if of.pieces else "auto",
            "snapshot": "release" if of.released else "auto",
        },
        algorithm={"longest": 8, "cache": 4} if of.algorithm == "dapo" else {},
        run={"steps": STEPS, "checkpoint_every": 1, "weights": str(weights(of)), "silent_s": 60},
    )
    roles = {"actor": actor, **({} if of.algorithm in ("gspo", "dapo") else others)}
    return Job.model_validate({**job.model_dump(), "roles": roles})
