"""The user's reward code: slow, wrong, hanging; a bounded number at a time, and failures are what the job says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
from runtime_threads import InThreads
from runtime_tiny import tiny_plan

from rollplex.ir.errors import DataError, RunError
from rollplex.runtime.calls import Call, HostCalls, Limits, Outcomes, score
from rollplex.runtime.protocol import CONTROLLER

Failure = Literal["stop"] | float


def calls_of(
    function: Callable[..., Any], limit_s: float = 5.0, workers: int = 8, failure: Failure = "stop"
) -> HostCalls:
    return HostCalls(function, "reward", Limits(limit_s, workers, failure))


def each(calls: HostCalls, count: int = 5) -> Outcomes[float]:
    return calls.each([Call(f"row {i}", {"i": i}) for i in range(count)], score)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hangs in a test goes on when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_results_come_in_order_from_several_threads() -> None:
    found = each(calls_of(lambda i: i * i), count=50)
    assert (found.results, found.failures) == ([i * i for i in range(50)], {})


@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_calls_run_at_a_time_than_the_job_says(workers: int) -> None:
    now, most, lock = 0, 0, threading.Lock()

    def reward(i: int) -> float:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1
        return i

    each(calls_of(reward, workers=workers), count=12)
    assert most == workers


def test_a_function_that_raises_is_named_with_its_row_and_line() -> None:
    def reward(i: int) -> float:
        if i == 3:
            raise ValueError("no such answer")
        return 0.0

    with pytest.raises(
        RunError, match=r"row 3: `reward` raised ValueError: no such answer\n    try: it raised at .*:\d+"
    ):
        each(calls_of(reward))


def test_a_function_that_exits_does_not_end_the_run_silently() -> None:
    def reward(i: int) -> float:
        raise SystemExit(3)

    with pytest.raises(RunError, match=r"row 0: `reward` raised SystemExit: 3"):
        each(calls_of(reward), count=1)


def test_a_function_that_hangs_is_given_up_after_its_limit(gate: threading.Event) -> None:
    def reward(i: int) -> float:
        if i == 1:
            gate.wait(60)
        return 0.0

    with pytest.raises(RunError, match=r"row 1: `reward` has not returned after 0.3 s"):
        each(calls_of(reward, limit_s=0.3))


@pytest.mark.parametrize("result", [None, "good", float("nan"), float("inf")])
def test_a_function_that_returns_no_number_is_named_with_its_row(result: Any) -> None:
    with pytest.raises(RunError, match=r"row 2: `reward` returned .*, not a finite number"):
        each(calls_of(lambda i: result if i == 2 else 0.0))


def test_under_a_number_the_rest_goes_on_and_every_failure_is_told(gate: threading.Event) -> None:
    """Of 12 calls one raises, one returns text, one hangs in the only thread: another takes over the calls behind."""

    def reward(i: int) -> Any:
        if i == 1:
            raise KeyError("answer")
        if i == 3:
            gate.wait(60)
        return "good" if i == 2 else float(i)

    found = each(calls_of(reward, limit_s=0.2, workers=1, failure=0.0), count=12)
    assert found.results == [0.0, None, None, None, *(float(i) for i in range(4, 12))]
    assert found.failures == {
        1: "`reward` raised KeyError: 'answer'",
        2: "`reward` returned 'good', not a finite number",
        3: "`reward` has not returned after 0.2 s",
    }


def test_calls_that_hang_are_counted_over_the_run_and_too_many_end_it(gate: threading.Event) -> None:
    calls = calls_of(lambda i: gate.wait(60), limit_s=0.1, workers=2, failure=0.0)
    assert each(calls, count=2).results == [None, None]
    with pytest.raises(RunError, match=r"\d calls of `reward` hang, more than run.reward_workers"):
        each(calls, count=1)


def test_calls_that_end_late_hang_no_longer() -> None:
    calls = calls_of(lambda i: time.sleep(0.3) or 1.0, limit_s=0.1, workers=2, failure=0.0)
    for _ in range(3):
        assert each(calls, count=2).results == [None, None]
        time.sleep(0.5)


def test_a_failure_counts_as_the_jobs_score_and_is_in_the_metrics() -> None:
    """Of 2 prompts x 2 responses the second response of each fails; advantages are those of scores 1, -1."""

    def reward(index: int) -> float:
        if index == 1:
            raise TimeoutError("the judge does not answer")
        return 1.0

    run = InThreads(tiny_plan(run={"reward_failure": -1.0, "reward_workers": 2}), {"reward": reward})
    run.step(0)
    assert run.feed.metrics == {"reward": 0.0, "reward_failures": 2}
    assert [line.partition(": ")[2] for line in run.feed.failures] == [
        "`reward` raised TimeoutError: the judge does not answer"
    ] * 2
    assert run.feed.failures[0].startswith("train.jsonl:")
    (scores,) = [value for value in run.states[CONTROLLER].values.values() if getattr(value, "shape", ()) == (2, 2)]
    assert scores.tolist() == [[1.0, -1.0], [1.0, -1.0]]
    run.close()


@pytest.mark.parametrize(
    ("lengths", "states"), [([3], "1 response_lengths of up to 3"), ([3, 7], "2 response_lengths of up to 7")]
)
def test_stated_lengths_that_the_plan_has_no_room_for_are_refused(lengths: list[int], states: str) -> None:
    run = InThreads(tiny_plan(), {"reward": lambda: 0.0})
    row = replace(run.feed.rows[0], extra={"response_lengths": lengths})
    message = rf"train.jsonl:\d+: it states {states} tokens\n.*try: state 2, of at most 6 tokens"
    with pytest.raises(DataError, match=message):
        run.feed._prompt(row)
    run.close()
