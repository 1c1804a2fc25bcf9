"""Two good job files, on GPUs and on the host, and the means to spoil them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollplex.ir.errors import JobError
from rollplex.ir.job import load_job

GOOD = """\
model: {name: Qwen2.5-VL-32B, dtype: bfloat16}
cluster:
  gpu: H800
  gpus_per_node: 8
  nodes: 1
  host_memory_gb: 1400
roles:
  actor:
    train:
      engine: megatron
      tensor_parallel: 8
    rollout:
      engine: vllm
      tensor_parallel: 4
      kv_cache_gib: 29
      runtime_gib: 3
    freeze: [vision]
  reference:
    score:
      engine: megatron
      tensor_parallel: 8
workload:
  prompts: 32
  group: 8
  prompt_tokens: 8192
  response_tokens: 2048
  frames: 16
schedule: rollplex
optimizer:
  lr: 1e-6
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def edited(*edits: tuple[str, str]) -> str:
    """GOOD with texts replaced; each must be there exactly once."""
    text = GOOD
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def refusal(directory: Path, text: str, *overrides: str) -> JobError:
    with pytest.raises(JobError) as error:
        load_job(write(directory, text), overrides)
    return error.value


TINY = """\
model: {name: tiny, dtype: float64}
cluster: {gpu: cpu, gpus_per_node: 1, host_memory_gb: 512 MB, capacity_gib: "1.5 GiB"}
roles:
  actor:
    train: {engine: host}
    rollout: {engine: host, kv_cache_gib: 48 MiB, runtime_gib: 0.5 KiB}
workload: {prompts: 4, group: 2, prompt_tokens: 64, response_tokens: 16}
run: {data: data/train.jsonl, weights: ../warm}
"""
TINY_CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 131,
}


def tiny(directory: Path) -> Path:
    (directory / "tiny").mkdir()
    (directory / "tiny" / "config.json").write_text(json.dumps(TINY_CONFIG))
    return write(directory, TINY)
