"""A job that trains at TP 2 on two GPUs of a node, and others; nothing of it is run."""

from __future__ import annotations

from typing import Any

from rollplex.ir.job import Job


def two_gpu_job(rollout_tp: int = 1, engine: str = "vllm", **run: Any) -> Job:
    """Megatron trains; `run` are keys of the job's section of that name."""
    return gpu_job(2, rollout_tp, 2, engine, **run)


def gpu_job(train_tp: int, rollout_tp: int, gpus: int, engine: str = "vllm", **run: Any) -> Job:
    """The same of other degrees, on so many GPUs."""
    actor = {
        "train": {"engine": "megatron", "tensor_parallel": train_tp},
        "rollout": {"engine": engine, "tensor_parallel": rollout_tp, "kv_cache_gib": 1},
    }
    return Job.model_validate(
        {
            "model": {"name": "Qwen2.5-VL-3B", "dtype": "bfloat16"},
            "cluster": {"gpu": "H200", "gpus_per_node": gpus, "host_memory_gb": 100},
            "roles": {"actor": actor},
            "workload": {"prompts": gpus, "group": 2, "prompt_tokens": 8, "response_tokens": 8},
            "run": run,
        }
    )
