"""A short run of tools/fuzz.py, and that it does find what it looks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import fuzz  # noqa: E402
from fuzz_cases import Case  # noqa: E402


def test_a_short_fuzz_finds_nothing(tmp_path: Path) -> None:
    """Some hundred cases in a process of their own; `--minutes 60` is the long one (benchmarks/results/fuzz.md)."""
    command = [sys.executable, str(ROOT / "tools/fuzz.py"), "--minutes", "0.1", "--seed", "5", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings" in done.stdout


def test_cases_repeat_by_their_numbers() -> None:
    """Case 7 of seed 1 is the same text whoever makes it, and not that of case 8."""
    cases = fuzz.Cases(ROOT, ({"feasible": True},))
    assert cases.make(1, 7) == cases.make(1, 7) != cases.make(1, 8)


@pytest.mark.parametrize("fault", [ValueError("broken"), MemoryError(), fuzz.TooLong()])
def test_what_is_no_answer_is_a_finding(fault: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A traceback, exhausted memory and a case over its time, each with the place it came from."""

    def fail(*_: object) -> str:
        raise fault

    monkeypatch.setattr(fuzz, "_job", fail)
    end = fuzz.run(Case("job-near", b"schedule: serial"), tmp_path)
    assert end["end"] == "finding"
    assert type(fault).__name__ in end["what"]


def test_an_error_without_a_place_is_a_finding() -> None:
    """Users need a line or a name to go to."""
    with pytest.raises(AssertionError, match="no place"):
        fuzz.check_error(fuzz.RollplexError("wrong"))
