"""What all tests share: a nursery of engine processes, which imports torch once, and what no run may get wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from rollplex.runtime import run
from rollplex.runtime.nursery import kept
from rollplex.runtime.report import Report, write_report

# A loaded machine is no counterexample: how long an example takes is not what these tests are about. A change is judged
# by the same examples as the one before it; ROLLPLEX_EXPLORE=1 draws others, as tools/fuzz.py does.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("explore" if os.environ.get("ROLLPLEX_EXPLORE") else "same")


@pytest.fixture(scope="session", autouse=True)
def one_nursery() -> Iterator[None]:
    with kept():
        yield


@pytest.fixture(autouse=True)
def bytes_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose arenas held other bytes than planned fails its test when it writes its report, however it ended."""

    def checked(report: Report, path: Path) -> None:
        write_report(report, path)
        assert [row for row in report.objects if not row.as_planned] == []
        assert [w for w in report.memory if w.planned != w.measured] == []
        assert [p for p in report.pieces if p.planned != p.measured] == []
        assert [p for p in report.places if p.planned != p.measured] == []

    monkeypatch.setattr(run, "write_report", checked)
