"""The user's host functions: bounded concurrency, a time limit a call, and errors that name the function and the row.

    scores = call_each(reward, "reward", [Call("clip7.mp4, response 2", {"response": ..}), ..], limit_s=30)

A call that hangs cannot be ended from outside; it is left to a daemon thread, and the run ends with an error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollplex.ir.errors import RunError

WORKERS = 8


@dataclass(frozen=True)
class Call:
    """One call of a host function; `row` is the data row (and response) it is about."""

    row: str
    arguments: Mapping[str, Any]


@dataclass
class _Board:
    """What the threads of one `call_each` share, under `changed`."""

    todo: deque[int]
    results: dict[int, Any] = field(default_factory=dict)
    running: dict[int, float] = field(default_factory=dict)
    failed: tuple[int, Exception | SystemExit] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)


def call_each(
    function: Callable[..., Any], name: str, calls: Sequence[Call], limit_s: float, workers: int = WORKERS
) -> list[Any]:
    """The results in order. Ends when all calls have returned, the first has raised, or one ran over `limit_s`.

    Raises RunError in the last two cases.
    """
    board = _Board(deque(range(len(calls))))
    for _ in range(min(workers, len(calls))):
        threading.Thread(target=_work, args=(board, function, calls), name=f"host {name}", daemon=True).start()
    with board.changed:
        while len(board.results) < len(calls):
            board.changed.wait(0.05)
            _raise_failure(board, name, calls)
            _raise_overdue(board, name, calls, limit_s)
    return [board.results[i] for i in range(len(calls))]


def _work(board: _Board, function: Callable[..., Any], calls: Sequence[Call]) -> None:
    while True:
        with board.changed:
            if not board.todo or board.failed:
                return
            i = board.todo.popleft()
            board.running[i] = time.monotonic()
        try:
            outcome = function(**calls[i].arguments)
        except (Exception, SystemExit) as err:
            with board.changed:
                board.failed = board.failed or (i, err)
                board.changed.notify_all()
            return
        with board.changed:
            del board.running[i]
            board.results[i] = outcome
            board.changed.notify_all()


def _raise_failure(board: _Board, name: str, calls: Sequence[Call]) -> None:
    if board.failed is None:
        return
    i, err = board.failed
    raise RunError(
        f"`{name}` raised {type(err).__name__}: {err}",
        where=calls[i].row,
        hint=f"{_raised_at(err)}; call `{name}` on this row by itself to see it again",
    ) from None


def _raise_overdue(board: _Board, name: str, calls: Sequence[Call], limit_s: float) -> None:
    now = time.monotonic()
    for i, since in board.running.items():
        if now - since > limit_s:
            what = f"`{name}` has not returned after {limit_s:g} s"
            raise RunError(what, where=calls[i].row, hint="raise run.reward_timeout_s, or make the function faster")


def _raised_at(err: BaseException) -> str:
    """`it raised at reward.py:12`: the innermost line, which is the user's more often than not."""
    trace = err.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"it raised at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
