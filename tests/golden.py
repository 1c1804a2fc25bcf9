"""Compare a text with its golden file; UPDATE_GOLDEN=1 in the environment rewrites the file instead."""

from __future__ import annotations

import os
from pathlib import Path

GOLDENS = Path(__file__).parent / "goldens"


def check(name: str, text: str) -> None:
    """Assert that a text is what goldens/NAME holds."""
    path = GOLDENS / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"no golden {path}: run once with UPDATE_GOLDEN=1 and read what it wrote"
    assert text == path.read_text(encoding="utf-8")
