"""One job under serial, rollplex and streamed on this CPU: step times, what overlap hides, copies of the actor.

    PYTHONPATH=. python benchmarks/host.py [ROUNDS] [--steps N]

The schedules are run in turn, ROUNDS times each, every time to the same bits, or the program ends with an error. The
model is of Qwen2.5-VL's architecture and untrained; a response ends with any of ENDS, so lengths are geometric: many
short ones and few long. The last line sums up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from examples.grpo import grpo
from examples.shapes.make import make
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan
from rollplex.passes.pipeline import compile_plan
from rollplex.runtime import feed
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.run import RunResult, run_plan

SCHEDULES = ("serial", "rollplex", "streamed")
ENDS = tuple(range(7))
"""Tokens that end a response, of 264: on average after 38."""
CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "tie_word_embeddings": False,
    "image_token_id": 262, "video_token_id": 263, "vision_start_token_id": 259, "vision_end_token_id": 260,
    "bos_token_id": 256, "eos_token_id": 258, "vocab_size": 264,
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {
        "model_type": "qwen2_5_vl", "depth": 2, "hidden_size": 48, "intermediate_size": 96, "num_heads": 2,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
        "out_hidden_size": 96, "fullatt_block_indexes": [1], "tokens_per_second": 4,
    },
}  # fmt: skip


def job(folder: Path, schedule: str, steps: int) -> Job:
    """8 prompts of a video, 8 responses each, one GPU."""
    host = {"engine": "host"}
    return Job.model_validate({
        "model": {"name": str(folder / "model"), "dtype": "float32", "config": CONFIG},
        "cluster": {"gpu": "cpu", "gpus_per_node": 1, "host_memory_gb": 4, "capacity_gib": "512 MiB"},
        "roles": {
            "actor": {"train": host, "rollout": {**host, "kv_cache_gib": "64 MiB", "runtime_gib": "64 MiB"}},
            "reference": {"score": host},
        },
        "workload": {
            "prompts": 8, "group": 8, "prompt_tokens": 128, "response_tokens": 256, "response_median": 27,
            "frames": 4, "max_pixels": 7056,
        },
        "schedule": schedule,
        "run": {"data": str(folder / "train.jsonl"), "steps": steps},
    })  # fmt: skip


def luck(tokens: list[int]) -> float:
    """A reward that differs between responses, so that every group has a gradient."""
    return sum(tokens) % 7 / 7


@dataclass
class Measured:
    """What the runs of one schedule gave; `digests` are those of all training state, `second_copy` bytes."""

    plan: Plan
    step_s: list[float] = field(default_factory=list)
    prefix: list[float] = field(default_factory=list)
    post: list[float] = field(default_factory=list)
    digests: list[dict[str, str]] = field(default_factory=list)
    second_copy: int = 0

    def add(self, result: RunResult) -> None:
        report = result.report
        self.step_s.append(report.step_s)
        self.prefix.append(report.overlap.hidden_share)
        self.post.append(report.overlap.post_hidden_share)
        self.digests.append(result.digests)
        self.second_copy = second_copy(self.plan, result)


def second_copy(plan: Plan, result: RunResult) -> int:
    """Bytes of weights that the rollout process reads from other physical pages than the trainer writes."""
    ours, theirs = (result.facts[ProcessId(kind, 0)]["inodes"] for kind in ("rollout", "train"))
    own = [o for o in plan.summary.objects if o.process == "rollout" and o.class_ == "regenerable"]
    apart = [o for o in plan.summary.objects if "rollout" in o.readers and ours.get(o.name) != theirs.get(o.name)]
    return sum(o.bytes for o in (*own, *apart))


def measure(rounds: int, steps: int) -> dict[str, Measured]:
    """The schedules in turn, `rounds` times."""
    with TemporaryDirectory() as name, patch.object(feed, "end_tokens", lambda tokenizer: ENDS):
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        make(folder, videos=16, heldout=1, seed=0)
        found = {s: Measured(compile_plan(grpo, job(folder, s, steps))) for s in SCHEDULES}
        for i in range(rounds):
            for schedule, measured in found.items():
                out = folder / f"{schedule}-{i}"
                measured.add(run_plan(measured.plan, hosts={"reward": luck}, out_dir=out))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of each run; the first is not timed")
    asked = parser.parse_args()
    found = measure(asked.rounds, asked.steps)
    if any(d != found["serial"].digests[0] for m in found.values() for d in m.digests):
        sys.exit("the schedules ended in different weights, moments or samples")
    machine = f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{machine}; medians of {asked.rounds} runs\n")
    print("| schedule | step s | over serial | prefix hidden | scoring and training hidden |")
    print("|---|---|---|---|---|")
    serial = median(found["serial"].step_s)
    for schedule, m in found.items():
        step = median(m.step_s)
        print(f"| {schedule} | {step:.3f} | {serial / step:.2f}x | {median(m.prefix):.0%} | {median(m.post):.0%} |")
    steps = {s: median(m.step_s) for s, m in found.items()}
    print("\nweights, moments and samples: the same bits in all runs")
    print(
        f"serial {steps['serial']:.3f} s, rollplex {steps['rollplex']:.3f} s ({serial / steps['rollplex']:.2f}x), "
        f"streamed {steps['streamed']:.3f} s ({serial / steps['streamed']:.2f}x); "
        f"prefix hidden {median(found['rollplex'].prefix):.0%}, post hidden {median(found['streamed'].post):.0%}; "
        f"second copy of the actor {max(m.second_copy for m in found.values())} bytes"
    )


if __name__ == "__main__":
    main()
