"""The program that kills engines on a GPU, on a host's run: every cell is there, and each can fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from runtime_tiny import luck, tiny_plan

from benchmarks.h200 import kill
from benchmarks.h200.kill import Leg, Machine, kill_all, page
from rollplex.runtime.crew import child_environment
from rollplex.runtime.nursery import nursery

NOTHING = Machine(lambda: 0, set)


def test_a_run_that_is_killed_twice_comes_to_its_end(tmp_path: Path) -> None:
    """Trainer in the second step, rollout in the third; the fourth is the last. Nothing is left behind."""
    plan = tiny_plan(run={"steps": 4, "checkpoint_every": 1})
    with nursery(child_environment(os.environ, plan.job["run"]["threads"])):
        pass  # what tests keep to start engines is there before, with its socket
    legs = kill_all(plan, {"reward": luck}, tmp_path / "run", NOTHING)
    assert [leg.wrong for leg in legs] == [{}, {}, {}]
    assert all(leg.noticed_s < kill.NOTICED_S for leg in legs[:2])
    assert page(legs)[-1] == "14 cells, 0 failed"
    assert [line.split(" | ")[0] for line in page(legs)[2:5]] == [
        "| train 0, run train, step 2",
        "| rollout 0, run generate, step 3",
        "| nobody, to the end",
    ]


def test_every_cell_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on as if nothing had happened, memory and a daemon that stay, a process that is left."""
    answers = iter([0, *[1 << 30] * 10**6])
    pids = iter([set[int](), *[{7}] * 10**6])
    there = iter([{"children": []}, *[{"children": ["train 0"]}] * 3])
    monkeypatch.setattr(kill, "GONE_S", 0.01)
    monkeypatch.setattr(kill, "leftovers", lambda out: next(there))
    monkeypatch.setattr(kill, "_run", lambda *a, **k: ValueError("no"))
    legs = kill_all(tiny_plan(), {}, tmp_path, Machine(lambda: next(answers), lambda: next(pids)))
    columns: list[Any] = [set(leg.wrong) for leg in legs]
    assert columns[1] == set(kill.COLUMNS)
    assert columns[0] == set(kill.COLUMNS) - {"resumed"}  # it was to begin at the beginning
    assert columns[2] == set(kill.COLUMNS) - {"told"}
    lines = page(legs)
    assert lines[-1] == "14 cells, 13 failed"
    assert "nobody, to the end: resumed: it ended with no" in lines
    assert "train 0, run train, step 2: GPU memory: not within 0.01 s: at most 67,108,864 bytes in use" in lines
    assert "train 0, run train, step 2: processes: left: children train 0" in lines


def test_what_was_told_is_held_against_what_was_done() -> None:
    leg = Leg("train 0")
    leg.note("told", [])
    assert leg.wrong == {}
    leg.note("told", ["rollout 0 was killed"])
    assert page([leg])[-2:] == ["train 0: told: rollout 0 was killed", "5 cells, 1 failed"]
