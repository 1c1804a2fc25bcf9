"""Schedules, sharing, memory and new weights on one H200 or several, part by part: what the page of results says.

python -m benchmarks.h200.table PLANS --out benchmarks/results/two_h200.md     the plans of plans.py, in their order
    [--calibrate JOB --seconds 200] [--limit 560] [--gap 0.05] [--most 5.5] [--windows NAME] [--again PART]
    [--runs /dev/shm/runs]

What plans read is made where it is missing (setup.py). Page and state are written after each part; called again with
the same --runs, it goes on with the parts that are missing, and with those of plans that are new. --limit begins no
part that may take longer than what is left, by what one of its kind took before or by an estimate (parts.py). The
state is RUNS/state.json, the calibration RUNS/calibration.json: they may be carried away and back. Where nothing is
left to measure the page is made without a GPU.

    serial 5.7 s (1.00x); ..; second copy 0 bytes; 200 steps, no hang; all holds       the last line

Exit status 1 where something does not hold or a part has failed, 3 where parts are left to run, 2 for wrong input.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.driver import Driver, nvml
from benchmarks.h200.pages import page
from benchmarks.h200.parts import Calibrating, Part, gathered, parts_of
from benchmarks.h200.plans import HERE
from benchmarks.h200.running import Watch
from benchmarks.h200.setup import fill, prepare
from benchmarks.h200.state import Done, State
from benchmarks.h200.verdict import GAP, problems
from benchmarks.page import measured_with
from rollplex.backends.cuda.machine import cards, driver_version
from rollplex.ir.calibration import read_calibration
from rollplex.ir.errors import RollplexError, RunError

MULTICAST = "NCCL_NVLS_ENABLE"  # whose buffers no plan counts; every process that is started inherits it
WRONG, LEFT = 1, 3
PLAN = "rollplex, MPS default"


def say(text: str) -> None:
    """Progress; the page alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def machine() -> str:
    """GPUs, driver, versions; RunError where there is no GPU to measure."""
    nvml()
    names = [card.name for card in cards()]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    used = measured_with("torch", "vllm", "megatron-core")
    return f"{gpus}, driver {driver_version()}; {MULTICAST}={os.environ.get(MULTICAST, '')}; {used}"


def measure(part: Part) -> Done:
    """One part; one that fails says why, in whatever way: the machine is lent for the others too."""
    began, failed, found = time.monotonic(), "", None
    try:
        found = part.measure()
    except (RollplexError, OSError) as err:
        failed = str(err)
    except Exception as err:
        traceback.print_exc()
        failed = f"{type(err).__name__}: {err}"
    seconds = time.monotonic() - began
    say(f"{part.name}: {'FAILED' if failed else 'done'} in {seconds:.0f} s")
    return Done(part.kind, part.digest, seconds, failed, found)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path)
    made.add_argument("--runs", type=Path, default=Path("/dev/shm/runs"))
    made.add_argument("--out", type=Path)
    made.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS")
    made.add_argument("--gap", type=float, default=GAP, help="bound of the logprob gap, nats")
    made.add_argument("--most", type=float, default=math.inf, metavar="SECONDS", help="bound of the fastest step")
    made.add_argument("--windows", default=PLAN, metavar="NAME", help="the plan whose windows are told one by one")
    made.add_argument("--again", action="append", default=[], metavar="PART", help="measure this part once more")
    made.add_argument("--calibrate", type=Path, metavar="JOB")
    made.add_argument("--seconds", type=float, default=200.0, help="about how long `rollplex calibrate` may take")
    made.add_argument("--beside", type=Path, default=HERE / "h200_3b.json", help="the calibration that is shown beside")
    return made


def work(asked: argparse.Namespace, watch: Watch, heading: Callable[[], str]) -> int:
    """Measure what is missing, as far as there is time; the exit status. RollplexError for wrong input."""
    began, file = time.monotonic(), asked.runs / "state.json"
    state, beside = State.read(file), read_calibration(asked.beside)
    state.heading = state.heading or heading()
    asked.runs.mkdir(parents=True, exist_ok=True)
    ready = prepare(asked.folder, asked.runs / "plans")
    calibrating = Calibrating(asked.calibrate, asked.seconds) if asked.calibrate else None
    parts = list(parts_of(ready, asked.runs, watch, calibrating))
    if todo := to_run(parts, state, asked.again):
        heading()  # raises where there is no GPU for them
        fill(each.job for each in ready)

    def show() -> str:
        text = page(gathered(state, parts, ready), state.heading, asked.gap, asked.windows, beside, asked.most)
        if asked.out:
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(text, encoding="utf-8")
        return text

    for part in todo:
        left = asked.limit - (time.monotonic() - began)
        if (expected := state.expected(part.kind, part.estimate_s)) > left:
            say(f"{part.name}: not begun, it may take {expected:.0f} s and {left:.0f} s are left")
            continue
        state.parts[part.name] = measure(part)
        state.write(file)
        show()
    print(show(), end="", flush=True)
    found = gathered(state, parts, ready)
    return WRONG if any(problems(found, asked.gap, asked.most)) else LEFT if found.missing else 0


def to_run(parts: Sequence[Part], state: State, again: Sequence[str]) -> list[Part]:
    """Parts that are not in the state, or are asked for again; RunError for a name that is none."""
    names = [part.name for part in parts]
    if unknown := [name for name in again if name not in names]:
        raise RunError(f"there is no part `{unknown[0]}`", where="--again", hint=f"one of {', '.join(names)}")
    return [part for part in parts if part.name in again or not state.has(part.name, part.digest)]


def main() -> None:
    """Measure, print the page, write it where it is asked for."""
    os.environ.setdefault(MULTICAST, "0")
    try:
        sys.exit(work(parser().parse_args(), Driver, machine))
    except RollplexError as err:
        say(f"error      {err}")
        sys.exit(2)


if __name__ == "__main__":
    main()
