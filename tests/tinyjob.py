"""The job of a tiny plan: one node of CPU processes whose memories are what the plan needs, to the byte."""

from __future__ import annotations

from typing import Any

from rollplex.ir.models import spec_from_config
from rollplex.ir.plan import Summary

GROUP = 4
KV_BYTES = 1152  # what two prompts and their responses take
CONFIG = {
    "model_type": "qwen2", "hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 2, "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip
MODEL = spec_from_config(CONFIG, "tiny")


def tiny_job(
    schedule: str, gpus: int, rollout_gpus: int | None, held: Summary, share: float | None = None
) -> dict[str, Any]:
    """Training TP 2 over rollout TP 1; a prompt group a slot for every data-parallel rank. The places of its pinned
    pool share no address, so a node has more than may be pinned at a time."""
    capacity, host, places = held.capacity_bytes, held.host_capacity_bytes, max(held.host_pool.bytes, 1)
    engine = {"engine": "host", "tensor_parallel": 2}
    rollout = {"engine": "host", "tensor_parallel": 1, "kv_cache_gib": KV_BYTES / 2**30, "runtime_gib": 0}
    return {
        "model": {"name": "tiny", "config": CONFIG},
        "cluster": {
            "gpu": "cpu", "gpus_per_node": gpus, "rollout_gpus": rollout_gpus, "capacity_gib": capacity / 2**30,
            "host_memory_gb": places * gpus / 10**9, "pinned_share": min(1.0, (host * gpus + 0.5) / (places * gpus)),
        },
        "roles": {"actor": {"train": engine, "rollout": rollout, "freeze": []}, "reference": {"score": engine}},
        "workload": {
            "prompts": rollout_gpus or gpus, "group": GROUP, "prompt_tokens": 2, "response_tokens": 1,
            "rollout": {"kind": "partial", "share": share} if share else {},
        },
        "schedule": schedule,
    }  # fmt: skip
