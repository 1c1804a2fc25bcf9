"""Strikes one step of one process, as a file says: every Python imports it that has this folder in its path.

{"kind": "train", "iteration": 1, "index": 17, "fault": "SIGKILL"}        in the file that ROLLPLEX_FAULT names
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from rollplex.ir.steps import Step
from rollplex.runtime import executor
from rollplex.runtime.background import BackgroundTasks
from rollplex.runtime.state import ProcessState

PLACE = Path(os.environ["ROLLPLEX_FAULT"])
_execute = executor.execute


def struck(state: ProcessState, step: Step) -> None:
    """The step of the program; before it what the file says, if it is this one's turn."""
    fault = json.loads(PLACE.read_text() or "{}")
    here = fault and (state.process.kind, state.iteration) == (fault["kind"], fault["iteration"])
    if here and state.program[fault["index"]] is step:
        strike(fault["fault"], state)
    _execute(state, step)


def strike(fault: str, state: ProcessState) -> None:
    """SIGKILL, SIGSTOP, an exception, or a step that does not end; when it came is left beside the file.

    The controller's own work, data and the user's functions, is where it may hang, and that runs in the background.
    """
    PLACE.with_suffix(".hit").write_text(str(time.monotonic()))
    match fault:
        case "SIGKILL" | "SIGSTOP":
            os.kill(os.getpid(), getattr(signal, fault))
        case "exception":
            raise ArithmeticError("a fault was injected here")
        case "hang" if isinstance(state.tasks, BackgroundTasks):
            state.tasks._tasks.run = lambda step, inputs: time.sleep(3600) or {}
        case "hang":
            time.sleep(3600)


executor.execute = struck
