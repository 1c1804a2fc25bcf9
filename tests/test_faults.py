"""The fault matrix has every kind of step of every process, and its program judges; all of it is `make faults`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollplex.ir.steps import Run

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from fault_cells import FILES, Cell, cells
from fault_run import small_plan

ROOT = Path(__file__).resolve().parent.parent


def test_every_kind_of_step_of_every_process_is_struck_in_every_way() -> None:
    plan = small_plan()
    found = cells(plan)
    between = {c.where for c in found if c.where.startswith("chunks ")}
    assert between == {"chunks 0 and 1", "chunks 6 and 7", "chunks 10 and 11"}
    assert len(found) == len(set(map(str, found))) >= 100
    for kind, program in plan.programs.items():
        labels = {f"run {s.task}" if isinstance(s, Run) else s.kind for s in program}
        for fault in ("SIGKILL", "SIGSTOP", "exception"):
            struck = {c.where for c in found if (c.process, c.fault, c.iteration) == (kind, fault, 1)}
            assert struck - between == labels, f"{kind}, {fault}"
    assert {"map_part", "unmap_part", "export"} <= {s.kind for s in plan.programs["train"]}
    assert {c.where for c in found if c.fault == "truncated"} == {*FILES, "every checkpoint"}
    assert {c.process for c in found if c.where == "checkpoint" and c.fault == "full disk"} == set(plan.programs)
    assert Cell("controller", "P2", "second run") in found


@pytest.mark.alone
def test_a_process_killed_between_two_chunks_of_a_released_snapshot_resumes_to_the_same_bits() -> None:
    """One cell: pages of theta_k are gone, some of theta_k+1 are written; the checkpoint has theta_k, whole."""
    command = [sys.executable, str(ROOT / "tools" / "faults.py"), "train", "chunks 0 and 1", "SIGKILL"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    line, last = done.stdout.splitlines()
    assert line.startswith("ok     train       chunks 0 and 1")
    assert re.search(r"train 0 \(pid \d+\) was killed by SIGKILL in step `(un)?map_part actor", line)
    assert last.endswith(", 0 failed")


@pytest.mark.alone
def test_a_step_that_hangs_is_told_and_the_run_resumes_to_the_same_bits() -> None:
    """One cell; its engine sleeps in `run generate` while its pulse goes on."""
    command = [sys.executable, str(ROOT / "tools" / "faults.py"), "rollout", "run generate", "hang"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    line, last = done.stdout.splitlines()
    assert line.startswith("ok     rollout     run generate")
    assert "has been at it for 8 s in step `run generate actor mb 0`" in line
    assert last.startswith("1 cells in ")
    assert last.endswith(", 0 failed")
