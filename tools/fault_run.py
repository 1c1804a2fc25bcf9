"""One cell of the fault matrix: strike a small run, look at what it says and leaves, resume it, compare bits.

Bench(plan, folder).judge(cell)      Verdict("told after 0.1 s: train 0 (pid 71) was killed ..", wrong=[])
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from fault_cells import SILENT_S, STEP_S, STEPS, Cell
from leftovers import leftovers
from runtime_tiny import luck, tight_plan
from struck import first_line, left, told, until

from rollplex.ir.errors import RollplexError
from rollplex.ir.plan import Plan
from rollplex.runtime import checkpoint
from rollplex.runtime.events import CheckpointWritten, IterationDone, Progress, Resumed, RunEvent, Started, StepEntered
from rollplex.runtime.events import silent as no_progress
from rollplex.runtime.run import RunResult, run_plan

SLACK_S = 6.0  # on a busy machine, from when a fault may be noticed to when it is told
MEASURED = ("step_s", "rollout_tokens_per_s")
FEW_BYTES = 1000  # of a file, for a process whose disk is full
Bits = dict[str, Any]


@dataclass
class Verdict:
    """What came of a cell, and everything that should not have been so."""

    outcome: str
    wrong: list[str] = field(default_factory=list)


def small_plan() -> Plan:
    """Three steps on one GPU, with state on the host and a checkpoint after each: every mechanism is at work.

    The snapshot is released for the update, of whose chunks the first three write it again.
    """
    return tight_plan(
        optimizer={"snapshot": "release", "chunks": 12},
        run={"steps": STEPS, "checkpoint_every": 1, "silent_s": SILENT_S, "step_timeout_s": STEP_S},
    )


def run(plan: Plan, out: Path, progress: Progress = no_progress, resume: bool = False) -> RunResult:
    """The run that every cell is about."""
    return run_plan(plan, hosts={"reward": luck}, out_dir=out, progress=progress, resume=resume)


def bits_of(result: RunResult) -> Bits:
    """All that must be equal: state, metrics of every step, the final weights."""
    rows = [{k: v for k, v in row.items() if k not in MEASURED} for row in result.report.metrics]
    weights = sha256((result.final / "model.safetensors").read_bytes()).hexdigest()
    return {"digests": result.digests, "metrics": rows, "weights": weights}


class Bench:
    """Judges cells in a folder of its own, against one run that nothing happened to."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.struck = Path(os.environ["ROLLPLEX_FAULT"])
        self.struck.write_text("{}")
        self.written = folder / "plan.json"  # a process that made the plan again would have another data set
        self.written.write_text(plan.to_json(), encoding="utf-8")
        self.reference = bits_of(run(plan, folder / "reference"))

    def judge(self, cell: Cell) -> Verdict:
        """Strike, look what is left, resume, compare, look again."""
        out = self.folder / "cell"
        shutil.rmtree(out, ignore_errors=True)
        before = self._leftovers()
        verdict = self._strike(cell, out)
        verdict.wrong += left(before, self._leftovers())
        if cell.resumes:
            verdict.wrong += self._resume(cell, out)
            verdict.wrong += left(before, self._leftovers())
        return verdict

    def _strike(self, cell: Cell, out: Path) -> Verdict:
        match cell.fault:
            case "SIGKILL" | "SIGSTOP" if cell.process == "controller":
                return self._strike_controller(cell, out)
            case "SIGKILL" | "SIGSTOP" | "exception" | "hang":
                return self._strike_step(cell, out)
            case "full disk":
                return self._fill_disk(cell, out)
            case "second run" | "second --resume":
                return self._second(cell, out)
            case _:
                return self._break(cell, out)

    # ---- a step

    def _strike_step(self, cell: Cell, out: Path) -> Verdict:
        with self._fault(cell):
            error = self._failing(out)
        late = time.monotonic() - float(self._hit.read_text())
        verdict = Verdict(f"told after {late:.1f} s: {first_line(error)}")
        if late > {"SIGSTOP": SILENT_S, "hang": STEP_S}.get(cell.fault, 0.0) + SLACK_S:
            verdict.wrong.append(f"noticed after {late:.1f} s")
        if not re.search(self._told(cell), first_line(error)):
            verdict.wrong.append(f"{self._told(cell)} was expected")
        return verdict

    def _told(self, cell: Cell) -> str:
        return told(cell.process, cell.fault, self.plan.programs[cell.process][cell.index], SILENT_S, STEP_S)

    def _strike_controller(self, cell: Cell, out: Path) -> Verdict:
        """The controller is a process of its own; one that was stopped is killed when its engines have given up."""
        with self._fault(cell), (self.folder / "once.log").open("w") as log:
            command = [
                sys.executable,
                str(Path(__file__).with_name("faults.py")),
                "--once",
                str(out),
                str(self.written),
            ]
            controller = subprocess.Popen(command, stdout=log, stderr=log)
            wrong = until(self._hit.exists, 120, "the controller came to the step")
            engines = psutil.Process(controller.pid).children(recursive=True)
            if cell.fault == "SIGSTOP":
                wrong += until(lambda: _gone(engines), SILENT_S + SLACK_S, "its engines gave up")
                controller.kill()
            controller.wait(SLACK_S)
            wrong += until(lambda: _gone(engines), SLACK_S, "its engines ended")
        late = time.monotonic() - float(self._hit.read_text()) if self._hit.exists() else float("nan")
        if controller.returncode != -signal.SIGKILL:
            wrong.append(f"the controller exited with {controller.returncode}")
        return Verdict(f"{len(engines)} engines ended by themselves, the last after {late:.1f} s", wrong)

    # ---- a disk, a directory, a checkpoint

    def _fill_disk(self, cell: Cell, out: Path) -> Verdict:
        """No file can grow from the second iteration on, or for the final weights when the last checkpoint is whole."""
        pids: dict[str, int] = {}
        final = cell.where == "final weights"

        def progress(event: RunEvent) -> None:
            if isinstance(event, Started):
                pids.update({process.kind: pid for process, pid in event.pids.items()})
            full = isinstance(event, CheckpointWritten) and event.step == STEPS if final else _second_done(event)
            if full and cell.process != "controller":
                resource.prlimit(pids[cell.process], resource.RLIMIT_FSIZE, (FEW_BYTES, FEW_BYTES))
            elif full:
                no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                patcher = patch.object(checkpoint, "_write_json", side_effect=no_room)
                patcher.start()

        try:
            error = self._failing(out, progress)
        finally:
            patch.stopall()
        wanted = "cannot write the weights" if final else "cannot write the checkpoint: (File too large|No space left)"
        verdict = Verdict(f"the run ends: {first_line(error)}")
        if not re.search(wanted, first_line(error)):
            verdict.wrong.append(f"{wanted} was expected")
        verdict.wrong += [f"half a checkpoint stayed: {path.name}" for path in out.glob("checkpoints/*.partial")]
        return verdict

    def _second(self, cell: Cell, out: Path) -> Verdict:
        """While the first run is in a phase another begins on its directory: it is refused, and the first goes on."""
        said: list[str] = []

        def progress(event: RunEvent) -> None:
            if not isinstance(event, StepEntered) or event.iteration != 1 or said:
                return
            if event.step.window.startswith(cell.where):
                said.append(first_line(self._failing(out, resume=cell.fault == "second --resume")))

        same = bits_of(run(self.plan, out, progress)) == self.reference
        verdict = Verdict(
            f"refused: {said[0] if said else 'nothing'}", [] if same else ["the first came to other bits"]
        )
        if f"another run is using this directory (pid {os.getpid()})" not in verdict.outcome:
            verdict.wrong.append("the second run was not refused")
        return verdict

    def _break(self, cell: Cell, out: Path) -> Verdict:
        """A run that was killed after two checkpoints, of which one or all are broken afterwards."""
        base = self.folder / "base"
        if not base.exists():
            with self._fault(Cell("train", "", "SIGKILL", len(self.plan.programs["train"]) - 1, 2)):
                self._failing(base)
        shutil.copytree(base, out)
        older, newest = (out / "checkpoints" / f"step-{step}" for step in (1, 2))
        if cell.where == "every checkpoint":
            for path in (older, newest):
                _damage(path / "train-0.safetensors", cell.fault)
            error = self._failing(out, resume=True)
            way_out = "to begin again from step 0" in str(error)
            return Verdict(f"refused: {first_line(error)}", [] if way_out else ["no way out was told"])
        _damage(newest / cell.where, cell.fault)
        return Verdict("resumed from step 1; step-2 was named, with what is wrong with it")

    # ---- pieces

    @property
    def _hit(self) -> Path:
        return self.struck.with_suffix(".hit")

    def _leftovers(self) -> dict[str, Any]:
        return {**leftovers(self.folder), "temporary": os.listdir(tempfile.gettempdir())}

    @contextmanager
    def _fault(self, cell: Cell) -> Iterator[None]:
        """While the block runs, engines and controller find the fault in the file they look into."""
        fault = {"kind": cell.process, "iteration": cell.iteration, "index": cell.index, "fault": cell.fault}
        self._hit.unlink(missing_ok=True)
        self.struck.write_text(json.dumps(fault))
        try:
            yield
        finally:
            self.struck.write_text("{}")

    def _failing(self, out: Path, progress: Progress = no_progress, resume: bool = False) -> Exception:
        try:
            run(self.plan, out, progress, resume)
        except (RollplexError, ArithmeticError) as err:
            return err.with_traceback(None)  # its frames hold the run
        return AssertionError("the run went on as if nothing had happened")

    def _resume(self, cell: Cell, out: Path) -> list[str]:
        seen: list[RunEvent] = []
        try:
            result = run(self.plan, out, seen.append, resume=True)
        except RollplexError as err:
            return [f"not resumed: {first_line(err)}"]
        wrong = [] if bits_of(result) == self.reference else ["resumed to other bits"]
        begun = next((event for event in seen if isinstance(event, Resumed)), None)
        if cell.process == "all":
            skipped = [Path(problem.where).name for problem in begun.skipped] if begun else []
            wrong += [] if begun and (begun.step, skipped) == (1, ["step-2"]) else [f"resumed as {begun}"]
        return wrong


def _second_done(event: RunEvent) -> bool:
    return isinstance(event, IterationDone) and event.iteration == 1


def _damage(path: Path, how: str) -> None:
    body = path.read_bytes()
    match how:
        case "truncated":
            path.write_bytes(body[: len(body) // 2])
        case "one bit changed":
            path.write_bytes(body[:-9] + bytes([body[-9] ^ 1]) + body[-8:])
        case "removed":
            path.unlink()
        case "of another plan":
            data = {**json.loads(body), "plan": "0" * 64}
            del data["sha256"]
            checkpoint._write_json(path, data)


def _gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
