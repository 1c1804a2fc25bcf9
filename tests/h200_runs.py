"""Runs as the page of H200s sees them: made by hand, or by engines of a host under a driver that counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_tiny import megatron_plan

from benchmarks.h200.plans import HERE, carried
from benchmarks.h200.ran import Gpu, Ran
from rollplex.ir.plan import Plan

HOSTS = {"reward": f"{HERE / 'reward.py'}:even"}


def step(step_s: float, decode: float, prefix: float, hidden: float, publish: float = 0.004) -> dict[str, Any]:
    """A step of report.json."""
    overlap = {"decode_s": decode, "prefix_s": prefix, "hidden_s": hidden, "post_s": 2.5, "post_hidden_s": 0.0}
    return {"step_s": step_s, "overlap": overlap, "windows": {"P3 publish": publish}}


def ran(name: str, steps: list[dict[str, Any]], **changes: Any) -> Ran:
    """A run of a plan whose bytes are in no figure here; `changes` are fields of Ran, or keys of its report."""
    plan = changes.pop("plan", None) or megatron_plan(1)
    memory = [{"window": "w", "planned": 100, "measured": 97}, {"window": "v", "planned": 100, "measured": 100}]
    report = {"steps": steps, "metrics": [{"logprob_gap": 0.02}], "memory": memory, "memory_as_planned": True}
    report |= {"stages": [{"phase": "start", "process": "train 0", "stage": "taking memory", "seconds": 1.25}]}
    report |= {"ended": "complete"}
    report |= {key: changes.pop(key) for key in list(changes) if key in report}
    window = plan.summary.windows[0]
    gpus = (Gpu(0, 1, 1, {window.name: window.hbm_bytes // 2}),)
    return Ran(name, plan, report, **{"gpus": gpus, "exchanges": (), "seconds": 60.0, **changes})


class Counted:
    """A driver that counts the same bytes at every time, and what was asked of it."""

    def __init__(self, device: int, used: int = 1, samples: int = 1) -> None:
        self.device, self.used, self.samples, self.before = device, used, samples, 0
        self.asked: list[tuple[int, int]] = []

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def within(self, start_ns: int, stop_ns: int) -> list[int]:
        self.asked.append((start_ns, stop_ns))
        return [self.used] * self.samples


def two_gpu_plan(schedule: str = "rollplex", **run: Any) -> Plan:
    """Trained at TP 2, rolled out at TP 1 on both GPUs, four steps."""
    wanted = {"silent_s": 60, "steps": 4, "checkpoint_every": 0, "hosts": HOSTS, **run}
    return megatron_plan(2, schedule=schedule, run=wanted)


def write_plans(folder: Path, **plans: Plan) -> Path:
    """As benchmarks.h200.plans writes them; `a_b` is `a b`."""
    folder.mkdir(exist_ok=True)
    for name, plan in plans.items():
        (folder / f"{name.replace('_', ' ')}.json").write_text(carried(plan), encoding="utf-8")
    return folder
