"""Cases of the fuzzer: a job or plan file made from a good one by a seeded random edit, the same for the same number.

    Cases(root).make(seed=7, number=42)     Case("job-values", job="model: ..", overrides=("schedule=naive",))

`*-bytes` edits the text, `*-values` the parsed values; `job-near` stays near what is legal, so that passes are reached.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rollplex.ir.hardware import GPUS
from rollplex.ir.models import model_names

JOBS: dict[str, str] = {
    "qwen2_5_vl_32b_h800x8": "grpo", "qwen2_5_vl_32b_h800x32": "grpo", "shapes_host": "grpo", "lora_72b_h800x8": "grpo",
    "critic_free_7b_h800x8": "rloo", "dapo_32b_h800x32": "dapo", "embodied_7b_h800x8": "embodied",
    "gspo_30b_a3b_h800x16": "gspo", "ppo_32b_h800x32": "ppo", "reward_model_32b_h800x8": "grpo_reward_model",
    "critic_free_host": "reinforce_pp", "dapo_host": "dapo", "gspo_host": "gspo", "ppo_host": "ppo",
    "reward_model_host": "grpo_reward_model", "embodied_host": "embodied",
}  # fmt: skip
"""Example jobs, and the algorithm that each is for."""
INTERESTING: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 8, 64, 1000, 65537, 2**31, 2**63, -(2**63), 10**30, 0.0, 0.5, 1.5, -0.0,
    1e-300, 1e308, float("inf"), float("-inf"), float("nan"),
    "", " ", "auto", "none", "hbm", "P1", "1 TiB", "-3 GiB", "1e9", "é\u202e\0", "x" * 3000, "actor",
    "../..", "/dev/zero", [], {}, [[]], [1, 2], {"a": 1}, {"ref": "x"}, [None], {"": None},
)  # fmt: skip
BYTES = (b"", b"\0", b"\xff", b"{", b"]", b": ", b"\n", b"- ", b"&a *a ", b"9" * 40, b"e9")
NEAR: dict[str, tuple[Any, ...]] = {
    "model": tuple(model_names()),
    "cluster.gpu": tuple(gpu.name for gpu in GPUS),
    "cluster.gpus_per_node": (1, 2, 3, 4, 8, 16, 72),
    "cluster.nodes": (1, 2, 4, 128, 4096),
    "cluster.host_memory_gb": (1, 64, 700, 1400, "2 TB", 1e6),
    "cluster.capacity_gib": (None, 0.001, 8, 40, 79.1, 139.8, 1e5),
    "cluster.pinned_share": (0.01, 0.5, 1),
    "roles.actor.train.tensor_parallel": (1, 2, 4, 8, 16),
    "roles.actor.rollout.tensor_parallel": (1, 2, 3, 4, 8),
    "roles.reference.score.tensor_parallel": (1, 2, 4, 8),
    "roles.actor.train.sequence_parallel": (True, False),
    "roles.actor.rollout.kv_cache_gib": (0.01, 1, 29, 60, 500),
    "roles.actor.rollout.runtime_gib": (0, 3, 100),
    "roles.actor.freeze": ([], ["vision"], ["language"]),
    "roles.actor.recompute": ("none", "full"),
    "roles.actor.prefix_saved": ("auto", "host", "hbm", "dropped", "group"),
    "workload.prompts": (1, 4, 8, 32, 128, 1024, 10**6, 10**9),
    "workload.group": (1, 2, 7, 8, 16, 10**6),
    "workload.prompt_tokens": (2, 17, 512, 8192, 131072, 10**9),
    "workload.response_tokens": (1, 16, 2048, 32768, 10**9),
    "workload.prompt_median": (None, 1, 470, 5900),
    "workload.response_median": (None, 1, 600, 2048),
    "workload.frames": (0, 1, 16, 768, 10**6),
    "workload.max_pixels": (None, 784, 200704, 10**9),
    "schedule": ("serial", "rollplex", "naive", "disaggregated"),
    "ablate": ([], ["state_offload"], ["rollout_release", "chunked_optimizer"], ["weight_sharing"]),
    "optimizer.chunks": ("auto", 1, 7, 4096),
    "optimizer.in_flight": (1, 2, 3, 50, 10**9),
    "sharing": ({"kind": "mps"}, {"kind": "fixed", "share": 0.6}, {"kind": "fixed"}),
    "roles.actor.lora": (None, {"rank": 8}, {"rank": 64, "served": "merged"}, {"rank": 16, "targets": ["qkv", "o"]}),
    "roles.actor.train.pipeline_parallel": (1, 2, 3, 4),
    "roles.actor.train.num_layers_in_first_pipeline_stage": (1, 6, 20),
    "roles.actor.train.context_parallel": (1, 2, 4),
    "roles.actor.train.expert_parallel": (1, 2, 8),
    "roles.actor.train.distributed_optimizer": (True, False),
    "roles.actor.train.engine": ("megatron", "fsdp", "fsdp_fused", "host", "vllm"),
    "roles.actor.rollout.gpu_memory_utilization": (0.1, 0.6, 0.9, 1),
    "workload.turns": (None, {"count": 2, "observation_tokens": 64}, {"count": 5, "observation_tokens": 4096}),
    "workload.rollout": ({"kind": "partial", "share": 0.5}, {"kind": "oversample", "factor": 2}),
    "workload.dynamic_sampling": (None, {"rounds": 2}, {"rounds": 5, "kept": 0.9}),
    "layout.order": ("stock", "reindex", "auto"),
    "cluster.rollout_gpus": (None, 2, 4, 8),
    "cluster.process_host_gib": (None, 0, 40),
    "algorithm.kl": (0, 0.1, "x", None),
    "algorithm.n": (2, 8, 0, -1),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One input: a job text with overrides for an algorithm, or a plan text."""

    kind: str
    text: bytes
    overrides: tuple[str, ...] = ()
    algorithm: str = "grpo"

    @property
    def is_plan(self) -> bool:
        """Whether the text is a plan file."""
        return self.kind.startswith("plan")


@dataclass(frozen=True)
class Cases:
    """Makes cases out of the example jobs and the plans given as parsed JSON."""

    root: Path
    plans: tuple[dict[str, Any], ...]

    @cached_property
    def texts(self) -> tuple[tuple[str, str], ...]:
        """The good job files and their algorithms; paths in them are made absolute: a case lies in its own folder."""
        files = ((self.root / f"examples/jobs/{job}.yaml", algorithm) for job, algorithm in JOBS.items())
        return tuple((file.read_text().replace("../", f"{self.root}/examples/"), name) for file, name in files)

    def make(self, seed: int, number: int) -> Case:
        """The case of a number under a seed."""
        rng = random.Random(f"{seed}/{number}")
        kinds: tuple[tuple[int, str, Callable[[random.Random], Case]], ...] = (
            (3, "job-bytes", self._job_bytes), (4, "job-values", self._job_values), (4, "job-near", self._job_near),
            (2, "plan-bytes", self._plan_bytes), (6, "plan-values", self._plan_values),
        )  # fmt: skip
        weights = [w for w, _, _ in kinds]
        return rng.choices([make for _, _, make in kinds], weights)[0](rng)

    def _job_bytes(self, rng: random.Random) -> Case:
        text, algorithm = rng.choice(self.texts)
        return Case("job-bytes", spoil(rng, text.encode()), (), algorithm)

    def _job_values(self, rng: random.Random) -> Case:
        text, algorithm = rng.choice(self.texts)
        data = yaml.safe_load(text)
        for _ in range(rng.randint(1, 4)):
            edit(rng, data)
        overrides = tuple(self._override(rng) for _ in range(rng.choice((0, 0, 1, 2))))
        return Case("job-values", dump(data), overrides, algorithm)

    def _override(self, rng: random.Random) -> str:
        key = rng.choice([*NEAR, "", "a.b", "cluster", "roles.", "model.name", "run.data", "solver.seconds"])
        return rng.choice((f"{key}={rng.choice(INTERESTING)}", f"{key}={rng.choice(NEAR.get(key, (1,)))}", key))

    def _job_near(self, rng: random.Random) -> Case:
        text, algorithm = rng.choice(self.texts)
        data = yaml.safe_load(text)
        for key in rng.sample(list(NEAR), rng.randint(1, 6)):
            put(data, key.split("."), rng.choice(NEAR[key]))
        return Case("job-near", dump(data), (), algorithm)

    def _plan_bytes(self, rng: random.Random) -> Case:
        return Case("plan-bytes", spoil(rng, json.dumps(rng.choice(self.plans)).encode()))

    def _plan_values(self, rng: random.Random) -> Case:
        data = copy.deepcopy(rng.choice(self.plans))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            edit(rng, data)
        return Case("plan-values", json.dumps(data).encode())


# ---- edits


def dump(data: Any) -> bytes:
    """YAML text of edited values."""
    return yaml.safe_dump(data, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")


def put(data: Any, path: list[str], value: Any) -> None:
    """Set a nested key, making or replacing sections on the way."""
    for key in path[:-1]:
        if not isinstance(data.get(key), dict):
            data[key] = {}
        data = data[key]
    data[path[-1]] = copy.deepcopy(value)


def spoil(rng: random.Random, text: bytes) -> bytes:
    """Cut, repeat, overwrite and insert bytes in a few places."""
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        start = rng.randrange(len(text) + 1)
        stop = min(len(text), start + rng.choice((0, 1, 1, 4, 40, 400)))
        new = rng.choice(
            (b"", b"\0", b"\xff", b"{", b"]", b": ", b"\n", b"- ", b"&a *a ", b"9" * 40, b"e9", text[start:stop] * 2)
        )
        text = text[:start] + new + text[stop:]
    return text


def edit(rng: random.Random, data: Any) -> None:
    """Change one value somewhere in nested dicts and lists: replace, delete, repeat, move, or add a key."""
    holder, key = place(rng, data)
    if holder is None:
        return
    match rng.choice(("value", "value", "near", "near", "delete", "repeat", "swap", "key")):
        case "value":
            holder[key] = copy.deepcopy(rng.choice(INTERESTING))
        case "near":
            holder[key] = near(rng, holder[key])
        case "delete":
            del holder[key]
        case "repeat" if isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        case "swap":
            other, there = place(rng, data)
            if other is not None:
                holder[key] = copy.deepcopy(other[there])
        case "key" if isinstance(holder, dict):
            holder[rng.choice(("", "x", key + "s", key.upper()))] = copy.deepcopy(holder[key])
        case _:
            holder[key] = None


def near(rng: random.Random, value: Any) -> Any:
    """A value a little beside another."""
    match value:
        case bool():
            return not value
        case int() | float():
            return rng.choice((value + 1, value - 1, -value, value * 2, value // 2, value * 10**6, value + 0.5))
        case str():
            return rng.choice((value + "x", value[:-1], value.upper(), f" {value}", value.replace("_", "-")))
        case list():
            return rng.sample(value, rng.randint(0, len(value)))
        case _:
            return value


def place(rng: random.Random, data: Any) -> tuple[Any, Any]:
    """A random place in nested containers, shallow ones as likely as deep ones."""
    holder: Any = None
    key: Any = None
    for _ in range(rng.randint(1, 8)):
        inner = data if holder is None else holder[key]
        keys: list[Any] = (
            list(inner) if isinstance(inner, dict) else list(range(len(inner) if isinstance(inner, list) else 0))
        )
        if not keys:
            break
        holder, key = inner, rng.choice(keys)
    return holder, key
