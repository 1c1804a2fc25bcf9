"""One plan on two H200s with both real engines, and what must hold of it: the first program to run there.

python -m benchmarks.h200.two PLAN.json [--runs DIR] [--gap NATS] [--out FILE]

    steps      logprob gap of each step, and rewards: the first step is before any update, the fourth behind three
    publish    slabs of the rollout shard from the other GPU: bytes, milliseconds, GB/s
    windows    planned bytes, and the most that the driver says is used on each GPU while a window lasts, behind step 1

Exit status 1 where a gap is over the bound, an object is not as planned, or a GPU has 5% more in use than its plan.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.driver import Driver
from benchmarks.h200.ran import Ran, read
from benchmarks.page import measured_with, table
from rollplex.ir.plan import Plan, read_plan

GIB = 2**30
OVER, GAP = 1.05, 0.05


@dataclass(frozen=True)
class Both:
    """A run as each GPU saw it; what differs is the driver's bytes and the windows of its training rank."""

    gpus: tuple[Ran, ...]
    exchange_ms: tuple[float, ...]

    @property
    def plan(self) -> Plan:
        return self.gpus[0].plan

    @property
    def metrics(self) -> list[dict[str, float]]:
        return self.gpus[0].report["metrics"]

    @property
    def sent(self) -> list[int]:
        """Bytes of each exchange of the first training rank."""
        return [step.nbytes for step in self.plan.programs["train"] if step.kind == "exchange"]


def run(file: Path, out: Path) -> Both:
    """The plan, from its first process to its report; CalledProcessError if it fails."""
    plan, began = read_plan(file), time.monotonic()
    with ExitStack() as stack:
        drivers = [stack.enter_context(Driver(gpu)) for gpu in range(plan.processes["train"].ranks)]
        subprocess.run([sys.executable, "-m", "rollplex.cli", "run", str(file), "--out", str(out)], check=True)
    seconds = time.monotonic() - began
    events = json.loads((out / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    runs = tuple(read(out, file.stem, plan, d.before, d.within, seconds, rank) for rank, d in enumerate(drivers))
    return Both(runs, tuple(exchanges(events)))


def exchanges(events: list[dict[str, Any]]) -> Iterator[float]:
    """Milliseconds of the first training rank's exchanges, behind the first iteration."""
    pid = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "train 0")
    own = (e for e in events if e["ph"] == "X" and e["pid"] == pid and e.get("cat") == "exchange")
    yield from (e["dur"] / 1e3 for e in own if e["args"]["iteration"])


def steps(ran: Both) -> list[str]:
    """A row a step."""
    keys = ("step_s", "logprob_gap", "grad_norm", "rollout_tokens_per_s")
    rows = [(str(i), *(f"{m.get(key, 0):.4g}" for key in keys)) for i, m in enumerate(ran.metrics)]
    return table(("updates before", "step s", "logprob gap, nats", "gradient norm", "rollout tokens/s"), rows)


def publication(ran: Both) -> str:
    """One line."""
    if not ran.exchange_ms or not ran.sent:
        return "publish: nothing is exchanged"
    ms = sum(ran.exchange_ms) / (len(ran.exchange_ms) / len(ran.sent))
    return (
        f"publish: {sum(ran.sent) / 1e9:.2f} GB to each GPU in {ms:.2f} ms a step, {sum(ran.sent) / ms / 1e6:.0f} GB/s"
    )


def windows(ran: Both) -> list[str]:
    """Planned and the driver's by window; a second copy of the actor would be there in all of them."""
    driven, rows = [r.driven() for r in ran.gpus], []
    for window in ran.plan.summary.windows:
        found = [used.get(window.name, 0) for used in driven]
        gpus = (f"{f / GIB:.2f} ({f / window.hbm_bytes - 1:+.1%})" for f in found)
        rows.append((window.name, f"{window.hbm_bytes / GIB:.2f}", *gpus))
    head = ("window", "planned GiB", *(f"GPU {gpu} GiB" for gpu in range(len(driven))))
    one = ran.gpus[0].actor_bytes() / GIB
    return [*table(head, rows), "", f"a second copy of the actor's snapshot would be {one:.2f} GiB more"]


def problems(ran: Both, gap: float) -> Iterator[str]:
    """What does not hold."""
    for step, metrics in enumerate(ran.metrics):
        if not metrics["logprob_gap"] <= gap:
            yield f"step {step}: trainer and rollout engine are {metrics['logprob_gap']:.4f} nats apart, over {gap}"
    if not ran.gpus[0].report["memory_as_planned"]:
        yield "objects are not as planned: see report.json"
    for gpu, each in enumerate(ran.gpus):
        found, planned = max(each.driven().values(), default=0), ran.plan.summary.peak_hbm_bytes
        if not found:
            yield f"GPU {gpu} was not looked at in any window"
        if found > OVER * planned:
            yield f"GPU {gpu} has {found / GIB:.2f} GiB in use, its plan {planned / GIB:.2f} GiB"


def main() -> None:
    """Run, print, and say what does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm/runs"))
    parser.add_argument("--gap", type=float, default=GAP, help="bound of the logprob gap in nats")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    ran = run(asked.plan, asked.runs / asked.plan.stem)
    head = (measured_with("torch", "vllm", "megatron-core"), "", asked.plan.name, "")
    text = "\n".join([*head, *steps(ran), "", publication(ran), "", *windows(ran)])
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    if wrong := list(problems(ran, asked.gap)):
        raise SystemExit("\n".join(wrong))
    print("holds: gaps, objects, memory")


if __name__ == "__main__":
    main()
