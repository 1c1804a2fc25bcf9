"""The job of a tiny plan: one node of CPU processes whose memories are what the plan needs, to the byte."""

from __future__ import annotations

from typing import Any

GROUP = 4


def tiny_job(
    schedule: str, gpus: int, rollout_gpus: int | None, capacity: int, host: int, share: float | None = None
) -> dict[str, Any]:
    """Training TP 2 over rollout TP 1; a prompt group a slot for every data-parallel rank."""
    engine = {"engine": "host", "tensor_parallel": 2}
    rollout = {"engine": "host", "tensor_parallel": 1, "kv_cache_gib": 1, "runtime_gib": 0}
    return {
        "model": {"name": "Qwen2.5-VL-3B"},
        "cluster": {
            "gpu": "cpu", "gpus_per_node": gpus, "rollout_gpus": rollout_gpus, "capacity_gib": capacity / 2**30,
            "host_memory_gb": host * gpus / 10**9, "pinned_share": 1.0,
        },
        "roles": {"actor": {"train": engine, "rollout": rollout, "freeze": []}, "reference": {"score": engine}},
        "workload": {
            "prompts": rollout_gpus or gpus, "group": GROUP, "prompt_tokens": 64, "response_tokens": 16,
            "rollout": {"kind": "partial", "share": share} if share else {},
        },
        "schedule": schedule,
    }  # fmt: skip
