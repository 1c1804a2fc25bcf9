"""Everything a user can fix is a `RollplexError`: where it happened, what is wrong, how much, and what to try."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Loc:
    """A line of the user's file; prints as `grpo.py:9`."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One thing to fix: `where: what (try: hint)`."""

    what: str
    where: str = ""
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n    try: {self.hint}" if self.hint else text


class RollplexError(Exception):
    """The base of every error that a user can fix; carries one or more problems, all reported at once."""

    def __init__(self, *problems: Problem | str, where: object = "", hint: str = "") -> None:
        self.problems = tuple(p if isinstance(p, Problem) else Problem(p, str(where), hint) for p in problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class JobError(RollplexError):
    """The job file, an override, a model config or the hardware description is wrong."""


class GraphError(RollplexError):
    """The algorithm breaks a rule of the dataflow graph; `where` is the user's file:line."""


class PassError(RollplexError):
    """A pass cannot go on: a fact is missing, or its input breaks its precondition."""


class PluginError(RollplexError):
    """Something an installed package adds cannot be used; `where` names the distribution and its entry point."""


class SolverTimeout(RollplexError):
    """A solver pass ran out of time before it found any solution (not the same as infeasible)."""


class PlanError(RollplexError):
    """The checker refuses a plan, or a plan file cannot be read."""


class DataError(RollplexError):
    """A dataset row, a video file or a frame is unusable."""


class OutOfMemory(RollplexError):
    """A device or the pinned host pool has no room: what was asked, what is live, the capacity."""


class EngineError(RollplexError):
    """An engine process died, went silent, or reported an error; names the process, the step and the window."""


class PeerError(EngineError):
    """A collective failed in this process: another rank of its group is gone or late."""


class RunError(RollplexError):
    """A run cannot start or go on for a reason other than a dead engine (a busy directory, a refused feature)."""
