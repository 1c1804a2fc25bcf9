"""Kill each engine of a run on a GPU in a step: what is told, what is left, and that the run goes on to its end.

    rollplex compile examples/grpo.py --job benchmarks/h200/job.yaml run.steps=4 run.checkpoint_every=1 \\
        -o kill.json                                                                  (where OR-Tools is)
    python -m benchmarks.h200.kill kill.json [--runs DIR]                             (on the H200)

| struck              | told after | told | processes | MPS | GPU memory | resumed |
| train 0, run train  | 0.1 s      | ok   | ok        | ok  | ok         | ok      |

    10 cells, 0 failed                                        the last line; exit status 1 when one has

The trainer is killed in the second step, the rollout engine in the third, of one run that is resumed behind each.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

from leftovers import leftovers  # noqa: E402
from struck import first_line, left, told, until  # noqa: E402

from benchmarks.page import table  # noqa: E402
from rollplex.hosts import find  # noqa: E402
from rollplex.ir.errors import RollplexError  # noqa: E402
from rollplex.ir.plan import Plan, read_plan  # noqa: E402
from rollplex.ir.steps import Run, Step  # noqa: E402
from rollplex.runtime.events import Resumed, RunEvent, StageBegun, Started, StepEntered  # noqa: E402
from rollplex.runtime.protocol import ProcessId  # noqa: E402
from rollplex.runtime.run import RunResult, run_plan  # noqa: E402

LEGS = (("train", "train", 1), ("rollout", "generate", 2))
"""Process kind, the task in which it is killed, and the iteration."""
GONE_S, NOTICED_S = 15.0, 5.0
SLACK_BYTES = 64 << 20  # of the driver's own, which come and go
COLUMNS = ("told", "processes", "MPS", "GPU memory", "resumed")
Hosts = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Machine:
    """What is looked at on the device: bytes in use, and pids of MPS daemons and servers."""

    used: Callable[[], int]
    mps: Callable[[], set[int]]


@dataclass
class Leg:
    """A part of the run, up to where it was struck: what was wrong, by column; a column that is missing was fine."""

    name: str
    noticed_s: float = float("nan")
    wrong: dict[str, list[str]] = field(default_factory=dict)
    columns: tuple[str, ...] = COLUMNS

    def note(self, column: str, wrong: list[str]) -> None:
        if wrong:
            self.wrong.setdefault(column, []).extend(wrong)


class Killer:
    """Hears a run's progress and kills the process of a leg as soon as it has entered its step."""

    def __init__(self, kind: str, task: str, iteration: int) -> None:
        self._at = (kind, task, iteration)
        self._pids: dict[ProcessId, int] = {}
        self.began = 0
        self.struck: Step | None = None
        self.struck_at = 0.0

    def __call__(self, event: RunEvent) -> None:
        match event:
            case StageBegun(process, stage):
                print(f"    {process} {stage}", file=sys.stderr, flush=True)
            case Started(pids):
                self._pids = dict(pids)
            case Resumed(step):
                self.began = step
            case StepEntered(process, iteration, Run(task=task) as step) if not self.struck:
                if (process.kind, task, iteration) == self._at:
                    self.struck, self.struck_at = step, time.monotonic()
                    os.kill(self._pids[process], signal.SIGKILL)
            case _:
                pass


def kill_all(plan: Plan, hosts: Hosts, out: Path, machine: Machine) -> list[Leg]:
    """Both legs, and the rest of the run behind them."""
    shutil.rmtree(out, ignore_errors=True)
    before, done, legs = _there(out, machine), 0, list[Leg]()
    for kind, task, iteration in LEGS:
        leg, killer = Leg(f"{kind} 0, run {task}, step {iteration + 1}"), Killer(kind, task, iteration)
        error = _run(plan, hosts, out, killer, resume=done > 0)
        if killer.struck is None or not isinstance(error, RollplexError):
            leg.note("told", [f"the run was to be struck and ended with {error!r}"])
        else:
            leg.noticed_s = time.monotonic() - killer.struck_at
            pattern = told(kind, "SIGKILL", killer.struck)
            leg.note("told", [] if re.search(pattern, first_line(error)) else [first_line(error)])
            leg.note("told", [] if leg.noticed_s < NOTICED_S else [f"after {leg.noticed_s:.1f} s"])
        leg.note("resumed", [] if killer.began == done else [f"it began behind step {killer.began}, not {done}"])
        _look(leg, before, out, machine)
        legs.append(leg)
        done = iteration
    return [*legs, _rest(plan, hosts, out, machine, before, done)]


def _rest(plan: Plan, hosts: Hosts, out: Path, machine: Machine, before: dict[str, Any], done: int) -> Leg:
    """Nobody is killed any more: the run comes to its end."""
    leg, killer = Leg("nobody, to the end", columns=COLUMNS[1:]), Killer("", "", -1)
    found, steps = _run(plan, hosts, out, killer, resume=True), plan.job["run"]["steps"]
    if not isinstance(found, RunResult):
        leg.note("resumed", [f"it ended with {first_line(found)}"])
    elif (killer.began, found.report.steps_done, len(found.report.metrics)) != (done, steps, steps):
        leg.note("resumed", [f"from step {killer.began} to {found.report.steps_done} of {steps}"])
    elif not list(found.final.glob("*.safetensors")):
        leg.note("resumed", ["there are no final weights"])
    _look(leg, before, out, machine)
    return leg


def _run(plan: Plan, hosts: Hosts, out: Path, killer: Killer, resume: bool) -> RunResult | Exception:
    try:
        return run_plan(plan, hosts=hosts, out_dir=out, progress=killer, resume=resume)
    except RollplexError as err:
        return err.with_traceback(None)  # its frames hold the run


def _there(out: Path, machine: Machine) -> dict[str, Any]:
    return {**leftovers(out), "used": machine.used(), "mps": machine.mps()}


def _look(leg: Leg, before: dict[str, Any], out: Path, machine: Machine) -> None:
    """What the leg has left; daemons and the driver are given some seconds."""
    most = before["used"] + SLACK_BYTES
    leg.note("MPS", until(lambda: machine.mps() <= before["mps"], GONE_S, "MPS ended"))
    leg.note("GPU memory", until(lambda: machine.used() <= most, GONE_S, f"at most {most:,} bytes in use"))
    kinds = {kind: before[kind] for kind in before if kind not in ("used", "mps")}
    leg.note("processes", left(kinds, leftovers(out)))


def page(legs: list[Leg]) -> list[str]:
    """The table, everything that was wrong, and the last line."""
    rows = []
    for leg in legs:
        cells = ("-" if c not in leg.columns else "FAILED" if c in leg.wrong else "ok" for c in COLUMNS)
        rows.append((leg.name, "-" if "told" not in leg.columns else f"{leg.noticed_s:.1f} s", *cells))
    lines = table(("struck", "told after", *COLUMNS), rows)
    lines += [f"{leg.name}: {column}: {what}" for leg in legs for column in leg.wrong for what in leg.wrong[column]]
    return [*lines, f"{sum(len(leg.columns) for leg in legs)} cells, {sum(len(leg.wrong) for leg in legs)} failed"]


def gpu() -> Machine:
    """The first GPU of this machine."""
    from benchmarks.driver import Driver

    return Machine(Driver().now, mps_pids)


def mps_pids() -> set[int]:
    """Of all daemons and servers."""
    found = set[int]()
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().startswith("nvidia-cuda-mps"):
                found.add(int(comm.parent.name))
        except OSError:
            continue  # it has ended
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/killed"))
    asked = parser.parse_args()
    plan = read_plan(asked.plan)
    legs = kill_all(plan, find(plan, {}), asked.runs, gpu())
    print("\n".join(page(legs)), flush=True)
    sys.exit(1 if any(leg.wrong for leg in legs) else 0)


if __name__ == "__main__":
    main()
