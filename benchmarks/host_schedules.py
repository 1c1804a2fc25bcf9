"""One job under serial, rollplex and streamed on this CPU: step times, what overlap hides, copies of the actor.

The job is small and of the shape that the paper measures (section 2.2): prompts of 16 frames of video, some 470 tokens,
each with 8 responses of some 30 tokens, so that nine tenths of a sample is its prompt; lengths are geometric, many
short and few long. The model is of Qwen2.5-VL's architecture and untrained; a response ends with any of ENDS.

A process computes on one thread, in every schedule: two may then work side by side where there are two cores, and what
a schedule leaves idle is its own doing. Serial has one process at work at a time, so it is measured with a thread for
every core too, once, and the others are held against the faster of both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from examples.grpo import grpo
from examples.shapes import make
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan
from rollplex.passes.pipeline import compile_plan
from rollplex.runtime import feed
from rollplex.runtime.nursery import kept
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.report import Overlap
from rollplex.runtime.run import RunResult, run_plan

SCHEDULES = ("serial", "rollplex", "streamed")
ENDS = tuple(range(7))
"""Tokens that end a response, of 264."""
SIDE = 196
"""Pixels of a clip's side: 49 visual tokens every 2 frames."""
VISION = {
    "model_type": "qwen2_5_vl", "depth": 2, "hidden_size": 48, "intermediate_size": 96, "num_heads": 2,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
    "out_hidden_size": 96, "fullatt_block_indexes": [1], "tokens_per_second": 4,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "tie_word_embeddings": False,
    "image_token_id": 262, "video_token_id": 263, "vision_start_token_id": 259, "vision_end_token_id": 260,
    "bos_token_id": 256, "eos_token_id": 258, "vocab_size": 264,
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "vision_config": VISION,
}  # fmt: skip


def job(folder: Path, schedule: str, threads: int, steps: int) -> Job:
    """8 prompts of a video, 8 responses each, one GPU."""
    host = {"engine": "host"}
    return Job.model_validate({
        "model": {"name": str(folder / "model"), "dtype": "float32", "config": CONFIG},
        "cluster": {"gpu": "cpu", "gpus_per_node": 1, "host_memory_gb": 4, "capacity_gib": "1 GiB"},
        "roles": {
            "actor": {"train": host, "rollout": {**host, "kv_cache_gib": "128 MiB", "runtime_gib": "128 MiB"}},
            "reference": {"score": host},
        },
        "workload": {
            "prompts": 8, "group": 8, "prompt_tokens": 512, "response_tokens": 256, "response_median": 27,
            "frames": 16, "max_pixels": SIDE * SIDE,
        },
        "schedule": schedule,
        "run": {"data": str(folder / "train.jsonl"), "steps": steps, "threads": threads},
    })  # fmt: skip


def luck(tokens: list[int]) -> float:
    """A reward that differs between responses, so that every group has a gradient."""
    return sum(tokens) % 7 / 7


@dataclass
class Measured:
    """What the runs of one schedule with so many threads a process gave; `digests` are those of all training state."""

    schedule: str
    threads: int
    plan: Plan
    seconds: list[float] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    digests: list[dict[str, str]] = field(default_factory=list)
    second_copy: int = 0

    @property
    def name(self) -> str:
        """Of its row."""
        return self.schedule if self.threads == 1 else f"{self.schedule}, {self.threads} threads"

    @property
    def step_s(self) -> float:
        """Median over runs of the mean seconds of a step."""
        return median(self.seconds)

    def of(self, figure: Callable[[Overlap], float]) -> float:
        """The median of one figure of overlap."""
        return median(map(figure, self.overlaps))

    def add(self, result: RunResult) -> None:
        """One more run."""
        self.seconds.append(result.report.step_s)
        self.overlaps.append(result.report.overlap)
        self.digests.append(result.digests)
        self.second_copy = max(self.second_copy, second_copy(self.plan, result))


def second_copy(plan: Plan, result: RunResult) -> int:
    """Bytes of weights that the rollout process reads from other physical pages than the trainer writes."""
    ours, theirs = (result.facts[ProcessId(kind, 0)]["inodes"] for kind in ("rollout", "train"))
    own = [o for o in plan.summary.objects if o.process == "rollout" and o.class_ == "regenerable"]
    apart = [o for o in plan.summary.objects if "rollout" in o.readers and ours.get(o.name) != theirs.get(o.name)]
    return sum(o.bytes for o in (*own, *apart))


@contextmanager
def _data() -> Iterator[Path]:
    """A folder with the model's configuration and clips of SIDE pixels; small ones would have few visual tokens."""
    with TemporaryDirectory() as name, patch.object(make, "SIDE", SIDE):
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        make.make(folder, videos=16, heldout=1, seed=0)
        yield folder


def measure(rounds: int, steps: int, say: Callable[[str], None]) -> list[Measured]:
    """The schedules in turn, `rounds` times; the first step of a run is not timed."""
    with _data() as folder, patch.object(feed, "end_tokens", lambda tokenizer: ENDS), kept():
        variants = [(s, 1) for s in SCHEDULES] + [("serial", n) for n in {len(os.sched_getaffinity(0))} - {1}]
        found = [Measured(s, n, compile_plan(grpo, job(folder, s, n, steps))) for s, n in variants]
        for i in range(rounds):
            for k, measured in enumerate(m for m in found if m.threads == 1 or i == 0):
                measured.add(run_plan(measured.plan, hosts={"reward": luck}, out_dir=folder / f"{k}-{i}"))
                say(f"round {i + 1} of {rounds}  {measured.name}: {measured.seconds[-1]:.3f} s a step")
    return found
