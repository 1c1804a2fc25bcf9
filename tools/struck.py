"""What a struck run must say, and what it may not leave: shared by the fault matrix and by what kills engines on a GPU.

told("train", "SIGKILL", step)       the pattern of the error that names who, what happened to it, and in which step
until(condition, 6, "they ended")    [] or ["not within 6 s: they ended"]
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from rollplex.ir.steps import Step, describe


def told(kind: str, fault: str, step: Step, silent_s: float = 0.0, step_s: float = 0.0) -> str:
    """A regular expression for the error's first line."""
    where = re.escape(f"in step `{describe(step)}`")
    match fault:
        case "SIGKILL":
            return rf"{kind} 0 \(pid \d+\) was killed by SIGKILL {where}"
        case "SIGSTOP":
            return rf"{kind} 0 \(pid \d+\) has said nothing for {silent_s:g} s {where}"
        case "hang":
            return rf"{kind} 0 (\(pid \d+\) )?has been at it for {step_s:g} s {where}"
        case _:
            return "a fault was injected here"


def left(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is there now and was not before."""
    return [f"left: {kind} {item}" for kind in before for item in after[kind] if item not in before[kind]]


def until(condition: Callable[[], bool], seconds: float, what: str) -> list[str]:
    """Wait; what is wrong if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return [f"not within {seconds:g} s: {what}"]
        time.sleep(0.02)
    return []


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
