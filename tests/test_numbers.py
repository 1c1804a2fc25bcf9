"""`make numbers`: every published figure beside the computed one, and none is off."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import published  # pyright: ignore[reportMissingImports]
import reproduce  # pyright: ignore[reportMissingImports]


@pytest.mark.parametrize("section", reproduce.SECTIONS, ids=lambda s: s.__name__)
def test_every_published_figure_is_reproduced(section: Callable[[], Iterator[reproduce.Row]]) -> None:
    """The rows of one section."""
    rows = list(section())
    assert rows
    assert not [f"{r.what}: published {r.published}, computed {r.computed}" for r in rows if not r.agrees]


def test_a_figure_that_is_off_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One parameter more in the published total: the row says OFF, and the exit status is 1."""
    wrong = {**published.MODELS, "Qwen2.5-VL-3B": (3_754_622_977, 6.99, 36_864)}
    monkeypatch.setattr(published, "MODELS", wrong)
    monkeypatch.setattr(reproduce, "SECTIONS", (reproduce.models,))
    assert reproduce.main() == 1
    printed = capsys.readouterr().out
    assert "Qwen2.5-VL-3B, parameters             3,754,622,977    3,754,622,976    OFF" in printed
    assert "1 figures are off" in printed
