"""The user's host functions: bounded concurrency, a time limit a call, and errors that name the function and the row.

    calls = HostCalls(reward, "reward", Limits(timeout_s=30, workers=8, failure=0.0))
    found = calls.each([Call("clip7.mp4, response 2", {"response": ..}), ..], read=score)
    found.results == [0.5, None, ..]         found.failures == {1: "`reward` raised KeyError: 'answer'"}

A call fails when it raises, takes longer than `timeout_s`, or returns what `read` refuses. Under `stop` the first
failure ends the run; under a number failures are told apart and the caller puts the number there.

A call that hangs cannot be ended from outside: it keeps its daemon thread, another thread takes its place, and when
more than `workers` such threads hang the run ends all the same.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from rollplex.ir.errors import RunError

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of a host function; `row` is the data row (and response) it is about."""

    row: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """How many calls at a time, how long each, and what a failure means: `stop`, or the score it counts as."""

    timeout_s: float
    workers: int
    failure: Literal["stop"] | float


@dataclass(frozen=True)
class Outcomes(Generic[T]):
    """Results in order, None for a call that failed; what happened to those, by number of the call."""

    results: list[T | None]
    failures: dict[int, str]


class Unusable(Exception):
    """A result that is not what the function must return."""


@dataclass
class _Board(Generic[T]):
    """What the threads of one `each` share, under `changed`."""

    todo: deque[int]
    results: dict[int, T] = field(default_factory=dict)
    failures: dict[int, RunError] = field(default_factory=dict)
    running: dict[int, float] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)


class HostCalls:
    """One host function over a whole run; remembers the calls that still hang."""

    def __init__(self, function: Callable[..., Any], name: str, limits: Limits) -> None:
        self.function = function
        self.name = name
        self.limits = limits
        self._hanging = 0

    def each(self, calls: Sequence[Call], read: Callable[[Any], T]) -> Outcomes[T]:
        """Ends when all calls have ended or failed; RunError at the first failure under `stop`, and when too many hang.

        `read` makes a result of what the function returned, or raises Unusable.
        """
        board: _Board[T] = _Board(deque(range(len(calls))))
        for _ in range(min(self.limits.workers, len(calls))):
            self._start(board, calls, read)
        with board.changed:
            try:
                while len(board.results) + len(board.failures) < len(calls):
                    board.changed.wait(0.05)
                    self._give_up_overdue(board, calls, read)
                    self._raise_first(board)
                self._raise_first(board)
            finally:
                board.closed = True
        failures = {i: error.problems[0].what for i, error in sorted(board.failures.items())}
        return Outcomes([board.results.get(i) for i in range(len(calls))], failures)

    def _start(self, board: _Board[T], calls: Sequence[Call], read: Callable[[Any], T]) -> None:
        arguments = (board, calls, read)
        threading.Thread(target=self._work, args=arguments, name=f"host {self.name}", daemon=True).start()

    def _work(self, board: _Board[T], calls: Sequence[Call], read: Callable[[Any], T]) -> None:
        while True:
            with board.changed:
                if not board.todo or board.closed:
                    return
                i = board.todo.popleft()
                board.running[i] = time.monotonic()
            try:
                outcome, error = read(self.function(**calls[i].arguments)), None
            except (Exception, SystemExit) as err:
                outcome, error = None, self._failure(calls[i], err)
            with board.changed:
                if i in board.given_up:
                    self._hanging -= 1
                    return
                del board.running[i]
                if error is not None:
                    board.failures[i] = error
                else:
                    board.results[i] = outcome  # pyright: ignore[reportArgumentType]
                board.changed.notify_all()

    def _give_up_overdue(self, board: _Board[T], calls: Sequence[Call], read: Callable[[Any], T]) -> None:
        """Calls over the limit have failed; each is left to its thread, and another takes over the rest."""
        limit, now = self.limits.timeout_s, time.monotonic()
        for i in [i for i, since in board.running.items() if now - since > limit]:
            del board.running[i]
            board.given_up.add(i)
            self._hanging += 1
            what, hint = f"`{self.name}` has not returned after {limit:g} s", "make the function faster"
            board.failures[i] = RunError(what, where=calls[i].row, hint=f"raise run.reward_timeout_s, or {hint}")
            self._start(board, calls, read)

    def _raise_first(self, board: _Board[T]) -> None:
        if board.failures and self.limits.failure == "stop":
            raise next(iter(board.failures.values()))
        if self._hanging > self.limits.workers:
            what = f"{self._hanging} calls of `{self.name}` hang, more than run.reward_workers"
            raise RunError(what, where=self.name, hint="give the function a time limit of its own")

    def _failure(self, call: Call, err: Exception | SystemExit) -> RunError:
        if isinstance(err, Unusable):
            what, hint = err.args
            return RunError(f"`{self.name}` returned {what}", where=call.row, hint=hint)
        again = f"call `{self.name}` on this row by itself to see it again, or set run.reward_failure to a score"
        return RunError(
            f"`{self.name}` raised {type(err).__name__}: {err}", where=call.row, hint=f"{_raised_at(err)}; {again}"
        )


def score(result: Any) -> float:
    """A result as one finite number; Unusable for anything else."""
    try:
        number = float(result)
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) < float("inf"):
        raise Unusable(f"{result!r}, not a finite number", "a host function returns one number for one response")
    return number


def message(result: Any) -> str:
    """A result as the next message to the model; Unusable for what is no text."""
    if not isinstance(result, str):
        raise Unusable(f"{result!r}, not a text", "an environment returns the next message to the model")
    return result


def _raised_at(err: BaseException) -> str:
    """`it raised at reward.py:12`: the innermost line, which is the user's more often than not."""
    trace = err.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"it raised at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
