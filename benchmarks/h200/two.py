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
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml

from benchmarks.h200.table import GIB, Ran, run
from benchmarks.page import measured_with, table
from rollplex.backends.cuda.machine import cards

POLL_S, OVER, GAP = 0.01, 1.05, 0.05
WINDOWS = 2
"""The track of a process' windows in a trace."""


def main() -> None:
    """Run, print, and say what does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm/runs"))
    parser.add_argument("--gap", type=float, default=GAP, help="bound of the logprob gap in nats")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    out = asked.runs / asked.plan.stem
    with Used() as used:
        ran = run(asked.plan, out)
    trace = Trace(json.loads((out / "trace.json").read_text(encoding="utf-8")))
    head = (measured_with("torch", "vllm", "megatron-core"), "", f"{ran.name}, {asked.plan.name}", "")
    text = "\n".join([*head, *steps(ran), "", publication(ran, trace), "", *windows(ran, trace, used)])
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    if wrong := list(problems(ran, asked.gap)):
        raise SystemExit("\n".join(wrong))
    print("holds: gaps, objects, memory")


class Used:
    """Bytes in use on each GPU beyond those that were when it began, every few milliseconds."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._cards = [pynvml.nvmlDeviceGetHandleByUUID(card.uuid) for card in cards()]
        self._before = self._now()
        self._found: list[tuple[int, list[int]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> Used:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def most(self, gpu: int, start_ns: int, stop_ns: int) -> int:
        """The most between two times of CLOCK_MONOTONIC; 0 where nobody has looked."""
        found = (used[gpu] - self._before[gpu] for ns, used in self._found if start_ns <= ns <= stop_ns)
        return max(found, default=0)

    def _now(self) -> list[int]:
        return [int(pynvml.nvmlDeviceGetMemoryInfo(card).used) for card in self._cards]

    def _poll(self) -> None:
        while not self._over.wait(POLL_S):
            self._found.append((time.monotonic_ns(), self._now()))


class Trace:
    """What a run's trace.json has of windows and exchanges."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self._events = trace["traceEvents"]
        self._origin = next(e["args"]["first_step"] for e in self._events if e["name"] == "monotonic_ns")
        self._pids = {e["args"]["name"]: e["pid"] for e in self._events if e["name"] == "process_name"}

    def windows(self, gpu: int) -> Iterator[tuple[str, int, int]]:
        """Window, start and stop of the training rank of a GPU, behind the first iteration."""
        for e in self._slices(gpu):
            if e["tid"] == WINDOWS and e["args"]["iteration"]:
                start = self._origin + int(1e3 * e["ts"])
                yield e["name"], start, start + int(1e3 * e["dur"])

    def exchange_ms(self) -> list[float]:
        """Milliseconds of the first training rank's exchanges, behind the first iteration."""
        return [e["dur"] / 1e3 for e in self._slices(0) if e["cat"] == "exchange" and e["args"]["iteration"]]

    def _slices(self, gpu: int) -> Iterator[dict[str, Any]]:
        pid = self._pids[f"train {gpu}"]
        return (e for e in self._events if e["ph"] == "X" and e["pid"] == pid)


def steps(ran: Ran) -> list[str]:
    """A row a step."""
    keys = ("step_s", "logprob_gap", "grad_norm", "rollout_tokens_per_s")
    rows = [(str(i), *(f"{m.get(key, 0):.4g}" for key in keys)) for i, m in enumerate(ran.report["metrics"])]
    return table(("updates before", "step s", "logprob gap, nats", "gradient norm", "rollout tokens/s"), rows)


def publication(ran: Ran, trace: Trace) -> str:
    """One line."""
    sent = [s["nbytes"] for s in ran.plan["programs"]["train"] if s["kind"] == "exchange"]
    found = trace.exchange_ms()
    if not found or not sent:
        return "publish: nothing is exchanged"
    ms = sum(found) / (len(found) / len(sent))
    return f"publish: {sum(sent) / 1e9:.2f} GB to each GPU in {ms:.2f} ms a step, {sum(sent) / ms / 1e6:.0f} GB/s"


def windows(ran: Ran, trace: Trace, used: Used) -> list[str]:
    """Planned and the driver's by window; a second copy of the actor would be there in all of them."""
    gpus = range(len(ran.used))
    most: dict[tuple[str, int], int] = {}
    for gpu in gpus:
        for name, start, stop in trace.windows(gpu):
            most[name, gpu] = max(most.get((name, gpu), 0), used.most(gpu, start, stop))
    rows = []
    for window in ran.plan["summary"]["windows"]:
        name, planned = window["name"], window["hbm_bytes"]
        found = [most.get((name, gpu), 0) for gpu in gpus]
        rows.append((name, f"{planned / GIB:.2f}", *(f"{f / GIB:.2f} ({f / planned - 1:+.1%})" for f in found)))
    snapshot = next(o["bytes"] for o in ran.plan["summary"]["objects"] if o["name"].endswith(".snapshot"))
    head = ("window", "planned GiB", *(f"GPU {gpu} GiB" for gpu in gpus))
    return [*table(head, rows), "", f"a second copy of the actor's snapshot would be {snapshot / GIB:.2f} GiB more"]


def problems(ran: Ran, gap: float) -> Iterator[str]:
    """What does not hold."""
    for step, metrics in enumerate(ran.report["metrics"]):
        if not metrics["logprob_gap"] <= gap:
            yield f"step {step}: trainer and rollout engine are {metrics['logprob_gap']:.4f} nats apart, over {gap}"
    if ran.off:
        yield f"{ran.off} objects are not as planned: see report.json"
    for gpu, found in enumerate(ran.used):
        if found > OVER * ran.planned:
            yield f"GPU {gpu} has {found / GIB:.2f} GiB in use, its plan {ran.planned / GIB:.2f} GiB"


if __name__ == "__main__":
    main()
