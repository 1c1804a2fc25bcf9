"""The benchmark of the host: what its last line tells, and that its small parts run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import host_schedules
from benchmarks.host import compared, summary
from benchmarks.host_publication import Publications, timed_publications
from benchmarks.host_schedules import Measured, job
from benchmarks.host_update import Updates, timed_updates, whole_tensors
from examples.grpo import grpo
from rollplex.passes.pipeline import compile_plan
from rollplex.runtime.report import Overlap


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Measured]:
    """Three runs of each schedule, and one of serial on two threads, which is the faster serial here."""
    folder: Path = tmp_path_factory.mktemp("job")
    plan = compile_plan(grpo, job(folder, "rollplex", 1, 2))
    steps = {("serial", 1): 4.0, ("rollplex", 1): 2.0, ("streamed", 1): 1.5, ("serial", 2): 3.0}
    return [
        Measured(name, threads, plan, [9.0, s, s / 2], [Overlap(2.0, 1.0, 0.5 * (name != "serial"))] * 3)
        for (name, threads), s in steps.items()
    ]


def test_the_last_line_has_what_was_asked(found: list[Measured]) -> None:
    """Schedules against the faster serial, the hidden prefix, publication, the stream, the second copy."""
    line = summary(found, Publications(0.0005, 0.040), Updates(0.2, 0.5, 0.4))
    assert line == (
        "serial 3.000 s, rollplex 2.000 s (1.50x), streamed 1.500 s (2.00x); prefix hidden 50%; "
        "publication 0.500 ms, copy and load 40.000 ms; optimizer stream 200.0 ms, unchunked 400.0 ms; "
        "second copy of the actor 0 bytes"
    )


def test_every_schedule_is_held_against_the_faster_serial(found: list[Measured]) -> None:
    """Serial with a thread for each core has a row of its own."""
    rows = [re.split(r" *\| *", line)[1:4] for line in compared(found, 2) if re.match(r"\| [a-z]+", line)][1:]
    assert rows == [
        ["serial", "4.000", "0.75x"],
        ["rollplex", "2.000", "1.50x"],
        ["streamed", "1.500", "2.00x"],
        ["serial, 2 threads", "3.000", "1.00x"],
    ]


def test_the_workload_is_mostly_prompts(found: list[Measured]) -> None:
    """Frames alone are 392 tokens, responses at most 38 on average; in the paper (2.2) prompts are 79 to 98 %."""
    load = found[0].plan.job["workload"]
    visual = (host_schedules.SIDE // 28) ** 2 * load["frames"] // 2
    assert visual == 392
    mean = 264 / len(host_schedules.ENDS)
    assert 0.79 < visual / (visual + mean) < 0.98


def test_the_small_parts_run() -> None:
    """They hold their own results together: the same bits each way, the reader sees the weights of its version."""
    numel = whole_tensors(10_000)
    assert numel == 9216
    assert timed_publications(numel, 2).in_place > 0
    assert timed_updates(numel, 2).overlapped > 0
