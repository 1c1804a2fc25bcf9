"""A tiny job that really runs: a model of the real architecture, three clips, GRPO; compiled by the real pipeline."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from capacities import smallest

from examples.grpo import grpo
from examples.shapes.make import make
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Fetch, UpdateChunk
from rollplex.passes.pipeline import compile_plan

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "image_token_id": 262,
    "video_token_id": 263,
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "hidden_size": 32,
    "vocab_size": 264,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 4,
    },
}

SHORT = {"prompt_tokens": 64, "frames": 2, "max_pixels": 3136}
"""Prompts whose activations take less than the states of an update, so that gradients must leave for that."""


def luck(tokens: list[int]) -> float:
    """A reward that is different for almost every response, so that advantages and gradients are never all zero."""
    return sum(tokens) % 7 / 7


@cache
def data_dir() -> Path:
    """A model directory and a data set, made once a test session."""
    folder = Path(mkdtemp(prefix="rollplex-test-"))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    make(folder, videos=4, heldout=1, seed=0)
    return folder


def tiny_job(**changes: Any) -> Job:
    """The job; `changes` are top-level sections merged into it: `run={"steps": 2}`, `schedule="serial"`."""
    data = {
        "model": {"name": str(data_dir() / "model"), "dtype": "float32", "config": CONFIG},
        "cluster": {"gpu": "cpu", "gpus_per_node": 1, "host_memory_gb": 4, "capacity_gib": "16 MiB"},
        "roles": {
            "actor": {
                "train": {"engine": "host"},
                "rollout": {"engine": "host", "kv_cache_gib": "256 KiB", "runtime_gib": "128 KiB"},
            },
            "reference": {"score": {"engine": "host"}},
        },
        "workload": {
            "prompts": 2,
            "group": 2,
            "prompt_tokens": 128,
            "response_tokens": 6,
            "frames": 4,
            "max_pixels": 7056,
        },
        "optimizer": {"lr": 1e-3},
        "run": {"data": str(data_dir() / "train.jsonl"), "steps": 2, "silent_s": 20},
    }
    for key, value in changes.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) and key in data else value
    return Job.model_validate(data)


@cache
def _compiled(text: str) -> Plan:
    return compile_plan(grpo, Job.model_validate_json(text))


def tiny_plan(**changes: Any) -> Plan:
    """The compiled plan of `tiny_job(**changes)`."""
    return _compiled(tiny_job(**changes).model_dump_json())


def tight_plan(responses: int = 2, **changes: Any) -> Plan:
    """The plan for the smallest device on which every mechanism is at work.

    A part of the reference leaves and returns, moments stream from the host, the saved prefix state is on the host, and
    suffix steps take `responses` responses at a time.
    """
    return _tight(responses, tiny_job(**changes).model_dump_json())


@cache
def _tight(responses: int, text: str) -> Plan:
    job = Job.model_validate_json(text)

    def job_at(capacity: str) -> Job:
        cluster = {**job.cluster.model_dump(), "capacity_gib": capacity}
        return Job.model_validate({**job.model_dump(), "cluster": cluster})

    return smallest(grpo, job_at, 3 << 9, lambda plan: _at_work(plan, responses), step=32)


def _at_work(plan: Plan, responses: int) -> bool:
    steps = plan.programs["train"]
    return (
        plan.summary.chunks.microbatch.suffix_responses == responses
        and "host" in plan.object("actor.prefix_saved").residency.values()
        and any(isinstance(s, Fetch) and s.object.startswith("reference.") for s in steps)
        and any(isinstance(s, UpdateChunk) and "actor.moments" in s.streams for s in steps)
    )
