"""The good plans that are edited everywhere: every schedule, tail, engine and cut of a model, small as jobs allow."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollplex.ir.job_auto import JobSet, load_jobs
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes.degrees import compile_best

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NODE, CLUSTER, HOST = "qwen2_5_vl_32b_h800x8", "qwen2_5_vl_32b_h800x32", "shapes_host"
PPO, DAPO, MOE = "ppo_32b_h800x32", "dapo_32b_h800x32", "gspo_30b_a3b_h800x16"
FEW = ("workload.prompts=2", "optimizer.chunks=6")
SHORT = ("workload.group=2", "workload.prompt_tokens=2048", "workload.response_tokens=128")
STREAMED = ("schedule=streamed", "workload.response_median=512", "roles.actor.rollout.kv_cache_gib=16")
TRAIN = "roles.actor.train."
PARTIAL = "workload.rollout={kind: partial, share: 0.5}"
OVERSAMPLE = "workload.rollout={kind: oversample, factor: 2}"
FSDP = """\
model: Llama-3.2-3B
cluster: {gpu: H100, gpus_per_node: 4, nodes: 1, host_memory_gb: 1000}
roles:
  actor:
    train: {engine: fsdp, microbatch: 2}
    rollout: {engine: vllm, kv_cache_gib: 20}
  reference:
    score: {engine: fsdp}
workload: {prompts: 8, group: 8, prompt_tokens: 512, response_tokens: 256}
schedule: serial
"""
CALIBRATED = Path(__file__).resolve().parents[1] / "data/h200_3b.json"
SOLVED = f"""\
model: Qwen2.5-VL-3B
cluster: {{gpu: H200, gpus_per_node: 1, host_memory_gb: 128, calibration: {CALIBRATED}}}
roles:
  actor:
    train: {{engine: megatron}}
    rollout: {{engine: vllm, kv_cache_gib: 40}}
    freeze: [vision]
  reference:
    score: {{engine: megatron}}
workload: {{prompts: 4, group: 8, prompt_tokens: 6000, response_tokens: 1185, response_median: 340}}
sharing: {{kind: solved}}
"""
PLANS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "rollplex": ("grpo", NODE, FEW),
    "serial": ("grpo", NODE, ("schedule=serial", *FEW)),
    "streamed": ("grpo", NODE, (*STREAMED, *FEW)),
    "naive": ("grpo", NODE, ("schedule=naive", "workload.prompts=2")),
    "no weight sharing": ("grpo", NODE, ("ablate=[weight_sharing]", *FEW)),
    "four nodes": ("grpo", CLUSTER, ("workload.prompts=8", "optimizer.chunks=4", "roles.actor.prefix_saved=host")),
    "host": ("grpo", HOST, ("workload.prompts=2",)),
    "several trained roles": ("ppo", PPO, ("cluster.nodes=1", "workload.prompts=4", "optimizer.chunks=4")),
    "two pools": (
        "grpo",
        CLUSTER,
        ("schedule=disaggregated", "cluster.rollout_gpus=16", "workload.prompts=8", "optimizer.chunks=6"),
    ),
    "partial": ("grpo", NODE, (PARTIAL, *FEW)),
    "oversample": ("grpo", NODE, (OVERSAMPLE, "schedule=serial", *FEW)),
    "fsdp": ("grpo", FSDP, ()),
    "dynamic sampling": ("dapo", DAPO, ("workload.prompts=8", "workload.group=4", "optimizer.chunks=6")),
    "PP, CP, EP": (
        "gspo",
        MOE,
        (
            *(TRAIN + f"{degree}_parallel=2" for degree in ("tensor", "pipeline", "context", "expert")),
            *(TRAIN + "distributed_optimizer=true", "roles.actor.rollout.tensor_parallel=2"),
            *("workload.prompts=8", "optimizer.chunks=6"),
        ),
    ),
    "auto": ("grpo", NODE, (TRAIN + "tensor_parallel=auto", "roles.reference.score.tensor_parallel=auto", *FEW)),
    "lora": ("grpo", NODE, ("roles.actor.lora={rank: 64}", *FEW)),
    "lora, merged": ("grpo", NODE, ("roles.actor.lora={rank: 64, served: merged}", *FEW)),
    "turns": ("embodied", "embodied_7b_h800x8", ("workload.turns.count=2", "workload.prompts=4", "optimizer.chunks=6")),
    "infeasible": ("grpo", NODE, ("cluster.capacity_gib=60", *FEW)),
    "solved": ("grpo", SOLVED, ("optimizer.chunks=6",)),
    "released": ("grpo", NODE, ("optimizer.snapshot=release", *FEW)),
    "with group": ("grpo", NODE, ("schedule=serial", "roles.actor.prefix_saved=group", *SHORT, *FEW)),
}


@cache
def compiled(name: str) -> Plan:
    """The plan of this name."""
    algorithm, job, overrides = PLANS[name]
    return compile_best(load_algorithm(EXAMPLES / f"{algorithm}.py"), _jobs(job, overrides))


def _jobs(job: str, overrides: tuple[str, ...]) -> JobSet:
    """Of an example by its name, or of a job's text."""
    if "\n" not in job:
        return load_jobs(EXAMPLES / f"jobs/{job}.yaml", overrides)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "job.yaml"
        file.write_text(job)
        return load_jobs(file, overrides)


def good(name: str) -> dict[str, Any]:
    """The same as JSON."""
    return json.loads(compiled(name).to_json())
