"""Run a plan in a process of its own while each of its GPUs is watched; or tell where every rank was when it ended.

python -m benchmarks.h200.running PLAN.json --out DIR       the run alone

    train 0 (pid 71) was killed by SIGABRT in step `run prefix actor mb 2`, ..             what the runtime says
    train 0: step `run prefix actor mb 2`, window P1 prefix-actor, step 58 of the run, for 63.0 s
    rollout 1: step `run generate %rollout mb 0`, window P1 decode, step 58 of the run, for 63.1 s
    train-0.log: WorkNCCL(SeqNum=911, OpType=ALLREDUCE, ..)                                what NCCL's watchdog says
    train-1.log: send shard.py:115 < _write trainer.py:227 < exchange trainer.py:214 ..    where its Python was
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from benchmarks.h200.plans import ROOT
from benchmarks.h200.ran import Gpu, Ran
from rollplex.hosts import find
from rollplex.ir.errors import RollplexError, RunError
from rollplex.ir.job import Job
from rollplex.ir.placement import cuda_device
from rollplex.ir.plan import Plan, read_plan
from rollplex.ir.steps import describe
from rollplex.runtime.events import IterationDone, RunEvent, StageBegun, StepEntered
from rollplex.runtime.process import die_with
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.run import run_plan

KEPT = ("steps", "metrics", "memory", "memory_as_planned", "stages", "ended")
"""Of report.json; what is told object by object stays there."""
SAMPLE_NS = 10**9  # before the first step, in which the driver must have been asked
TOLD_LINES, TOLD_FRAMES = 40, 8  # of what a part has written last, of a stack from its innermost call on
ENDING_S = 15.0  # for a program that was interrupted
WORK = re.compile(r"WorkNCCL\((?:[^()]|\([^()]*\))*\)")
STACK = re.compile(r"^(?:Current thread|Thread) 0x[^\n]*\n((?:  File [^\n]*\n)+)", re.MULTILINE)
FRAME = re.compile(r'  File "([^"]*)", line (\d+) in ([^\n]*)')
Slice = tuple[str, int, int]


class Watched(Protocol):
    """Bytes of a GPU in use: before the run, and sample by sample between two times in nanoseconds."""

    before: int

    def within(self, start_ns: int, stop_ns: int) -> list[int]: ...


Watch = Callable[[int], AbstractContextManager[Watched]]
"""Watches a CUDA device."""


class Whereabouts:
    """Hears a run's progress and knows what each process began last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at: dict[ProcessId, tuple[float, str]] = {}

    def __call__(self, event: RunEvent) -> None:
        match event:
            case StageBegun(process, stage) if stage:
                self._at[process] = (self._clock(), stage)
            case StepEntered(process, iteration, step):
                what = f"step `{describe(step)}`, window {step.window}, step {iteration + 1} of the run"
                self._at[process] = (self._clock(), what)
            case IterationDone(iteration, steps, metrics):
                print(f"step {iteration + 1} of {steps}: {metrics['step_s']:.2f} s", file=sys.stderr, flush=True)
            case _:
                pass

    def lines(self) -> Iterator[str]:
        """A line a process, with the seconds since it began."""
        now = self._clock()
        yield from (
            f"{process}: {what}, for {now - since:.1f} s" for process, (since, what) in sorted(self._at.items())
        )


def watchdogs(logs: Path) -> Iterator[str]:
    """The collective that NCCL's watchdog names in a rank's log, where it ended the rank."""
    for log in sorted(logs.glob("*.log")):
        if found := WORK.findall(log.read_text(encoding="utf-8", errors="replace")):
            yield f"{log.name}: {found[-1]}"


def stacks(logs: Path) -> Iterator[str]:
    """Where the Python of each rank was that wrote its stacks: of its first thread, which runs the plan's steps."""
    for log in sorted(logs.glob("*.log")):
        if found := STACK.findall(log.read_text(encoding="utf-8", errors="replace")):
            frames = FRAME.findall(found[-1])[:TOLD_FRAMES]  # the first thread is written last
            yield f"{log.name}: {' < '.join(f'{name} {Path(file).name}:{line}' for file, line, name in frames)}"


def devices(plan: Plan) -> dict[int, list[int]]:
    """The training ranks of each CUDA device that the plan is on."""
    job, found = Job.model_validate(plan.job), dict[int, list[int]]()
    for rank in range(plan.processes["train"].ranks):
        found.setdefault(cuda_device(job, rank), []).append(rank)
    return found


def called(command: Sequence[str], log: Path, limit_s: float | None = None) -> None:
    """A program of this checkout, what it says in a file; RunError with the end of that when it fails or is too slow.

    What takes longer than `limit_s` is interrupted, as its user would do it: so it ends what it has started.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}  # engines are started away from this directory
    with log.open("w", encoding="utf-8") as out:
        program = subprocess.Popen([sys.executable, "-m", *command], env=env, stdout=out, stderr=out)
        try:
            code, late = program.wait(limit_s), ""
        except subprocess.TimeoutExpired:
            code, late = 0, f"it has not ended for {limit_s:g} s\n"
        finally:
            _interrupted(program)
    if code or late:
        told = "\n".join(_end(log)) or ("it says nothing" if late else f"it says nothing, and exits with status {code}")
        raise RunError(late + told, where=f"python -m {command[0]}", hint=f"look at {log}")


def _interrupted(program: subprocess.Popen[bytes]) -> None:
    """Ended, whatever it takes: a run ends after its step when it is interrupted, at once when it is again."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        if program.poll() is not None:
            return
        program.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            program.wait(ENDING_S)


def _end(log: Path) -> list[str]:
    """The last paragraph of a log; of a traceback what it ends with."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n\n")[2].splitlines()
    if any(line.startswith("Traceback ") for line in lines):
        lines = lines[max(i for i, line in enumerate(lines) if not line.startswith(" ")) :]
    return lines[-TOLD_LINES:]


def run(name: str, file: Path, out: Path, watch: Watch, limit_s: float | None = None) -> Ran:
    """The plan in this file, to its last step; RunError where it ends before, with where each rank was."""
    plan, began = read_plan(file), time.monotonic()
    shutil.rmtree(out, ignore_errors=True)  # of a try that was cut off
    with ExitStack() as stack:
        seen = {device: stack.enter_context(watch(device)) for device in devices(plan)}
        called(["benchmarks.h200.running", str(file), "--out", str(out)], out.with_suffix(".log"), limit_s)
    shutil.rmtree(out / "final", ignore_errors=True)  # weights, which nobody reads, in memory of this machine
    return read(name, plan, out, seen, time.monotonic() - began)


def read(name: str, plan: Plan, out: Path, seen: Mapping[int, Watched], seconds: float) -> Ran:
    """The run that has left its results in the folder; RunError where a GPU was not watched."""
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    events = json.loads((out / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    gpus = tuple(_seen(name, plan, events, device, ranks, seen[device]) for device, ranks in devices(plan).items())
    return Ran(name, plan, {key: report[key] for key in KEPT}, gpus, tuple(exchanges(plan, events)), seconds)


def _seen(name: str, plan: Plan, events: list[dict[str, Any]], device: int, ranks: list[int], seen: Watched) -> Gpu:
    windows = [part for rank in ranks for part in windows_of(events, rank)]
    start, last = min(part[1] for part in windows), plan.summary.windows[-1].name
    used = seen.within(start - SAMPLE_NS, start)[-1:]
    if not used:  # a run that nobody watched proves nothing
        raise RunError(f"{name}: the driver of GPU {device} was not asked before the first step", hint="run it again")
    behind = min(part[2] for part in windows if part[0] == last)
    driven: dict[str, int] = {}
    for window, begins, ends in windows:
        for n in seen.within(begins, ends) if begins >= behind else ():
            driven[window] = max(driven.get(window, 0), n - seen.before)
    return Gpu(device, len(ranks), used[0] - seen.before, driven)


def windows_of(events: list[dict[str, Any]], rank: int) -> Iterator[Slice]:
    """Name, start and stop in nanoseconds of every window of a training rank, in order."""
    origin = next(e["args"]["monotonic_ns"] for e in events if e["name"] == "time_0")
    pid = _pid(events, rank)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
    for e in events:
        if e["ph"] == "X" and e["pid"] == pid and names[e["tid"]] == "windows":
            start = origin + int(e["ts"] * 1e3)
            yield e["name"], start, start + int(e["dur"] * 1e3)


def exchanges(plan: Plan, events: list[dict[str, Any]]) -> Iterator[float]:
    """Seconds in which new weights came from peers, for each step of the run but the first.

    They are those of the rank that came last, which waited for no other before it wrote; all end together.
    """
    train = plan.programs["train"]
    names = {describe(step) for step in train if step.kind == "exchange" and step.group == "q"}
    spent: dict[int, dict[int, float]] = {}
    for rank in range(plan.processes["train"].ranks):
        pid = _pid(events, rank)
        for e in events:
            if e["ph"] == "X" and e["pid"] == pid and e.get("cat") == "exchange" and e["name"] in names:
                of_step = spent.setdefault(e["args"]["iteration"], {})
                of_step[rank] = of_step.get(rank, 0.0) + e["dur"] / 1e6
    yield from (min(by_rank.values()) for iteration, by_rank in sorted(spent.items()) if iteration)


def _pid(events: list[dict[str, Any]], rank: int) -> int:
    return next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == f"train {rank}")


def main() -> None:
    """Run it; exit 1 where it fails, with where everyone was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    die_with(os.getppid())  # a command that is cut off leaves no GPU in use
    heard = Whereabouts()
    try:
        plan = read_plan(asked.plan)
        run_plan(plan, hosts=find(plan, {}), out_dir=asked.out, progress=heard)
    except RollplexError as err:
        logs = asked.out / "logs"
        raise SystemExit("\n".join(["\n" + str(err), *heard.lines(), *watchdogs(logs), *stacks(logs)])) from None


if __name__ == "__main__":
    main()
