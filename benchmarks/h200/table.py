"""Schedules and ways to share H200s, run one after the other on both real engines: what the page of results says.

python -m benchmarks.h200.table DIR --out benchmarks/results/step_h200.md      the plans of plans.py, in their order

A step is the mean of all but the first. A GPU's used memory is what its driver says, twice a second; of several GPUs
each has its figure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page import measured_with, table

POLL_S = 0.5
GIB = 2**30


@dataclass(frozen=True)
class Ran:
    """A plan, what came of it, and the most bytes that were in use on each GPU of it."""

    name: str
    plan: dict[str, Any]
    report: dict[str, Any]
    used: tuple[int, ...]

    @property
    def step_s(self) -> float:
        found = [row["step_s"] for row in self.report["metrics"][1:]]
        return sum(found) / len(found)

    def overlap(self, name: str) -> float:
        """Mean seconds a step."""
        return self.report["overlap"][name]

    @property
    def planned(self) -> int:
        """Peak bytes of the plan."""
        return self.plan["summary"]["peak_hbm_bytes"]

    @property
    def off(self) -> int:
        """Objects that were not as planned in some window: of other bytes, or a workspace larger than its own."""
        wrong = (o for o in self.report["objects"] if o["measured"] > o["planned"] or not _reserved(o))
        return len({o["object"] for o in wrong})


def _reserved(o: dict[str, Any]) -> bool:
    """A workspace may be larger than what was in it; everything else is as large as planned."""
    return o["temporary"] or o["measured"] == o["planned"]


class Driver:
    """The most memory in use on each of the first GPUs while the block runs, as nvidia-smi tells it."""

    def __init__(self, gpus: int = 1) -> None:
        self.most = [0] * gpus
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> Driver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _poll(self) -> None:
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._over.wait(POLL_S):
            found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
            self.most = [max(most, int(used) << 20) for most, used in zip(self.most, found, strict=False)] or self.most


def run(plan: Path, out: Path) -> Ran:
    """One plan, from its first process to its report."""
    compiled = json.loads(plan.read_text(encoding="utf-8"))
    with Driver(compiled["processes"]["train"]["ranks"]) as driver:
        subprocess.run([sys.executable, "-m", "rollplex.cli", "run", str(plan), "--out", str(out)], check=True)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return Ran(plan.stem.partition(" ")[2] or plan.stem, compiled, report, tuple(driver.most))


def page(found: list[Ran]) -> list[str]:
    """A row a run, all against the first."""
    serial, rows = found[0], []
    for r in found:
        times = (f"{r.step_s:.2f}", f"{serial.step_s / r.step_s:.2f}x", f"{r.plan['summary']['times']['step_s']:.2f}")
        parts = (f"{r.overlap('decode_s'):.2f}", f"{r.overlap('prefix_s'):.2f}", f"{r.overlap('hidden_s'):.2f}")
        post = (f"{r.overlap('post_s'):.2f}", f"{r.overlap('post_hidden_s'):.2f}")
        memory = (f"{r.planned / GIB:.1f}", " / ".join(f"{used / GIB:.1f}" for used in r.used), str(r.off))
        gap = f"{r.report['metrics'][-1]['logprob_gap']:.4f}"
        rows.append((r.name, *times, *parts, *post, *memory, gap))
    head = ("schedule", "step s", "over serial", "predicted s", "decode s", "prefix s", "of it hidden", "post s")
    head = (*head, "of it hidden", "planned GiB", "driver's GiB", "not as planned", "logprob gap")
    return table(head, rows)


def summary(found: list[Ran]) -> str:
    """The last line."""
    serial = found[0]
    told = (f"{r.name} {r.step_s:.2f} s ({serial.step_s / r.step_s:.2f}x)" for r in found)
    return "; ".join(told) + f"; not as planned: {sum(r.off for r in found)} objects"


def main() -> None:
    """Run all, print the page, write it where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm/runs"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: list[Ran] = []
    for plan in sorted(asked.folder.glob("*.json")):
        found.append(run(plan, asked.runs / plan.stem.partition(" ")[0]))
        text = "\n".join([measured_with("torch", "vllm", "megatron-core"), "", *page(found), "", summary(found)])
        if asked.out:
            asked.out.write_text(text + "\n", encoding="utf-8")
        print(text, flush=True)


if __name__ == "__main__":
    main()
