"""A reward that differs among responses of a model that has learned nothing: the share of even characters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def even(question: str, answer: str, response: str, row: Mapping[str, Any]) -> float:
    """0 to 1."""
    return sum(ord(c) % 2 == 0 for c in response) / max(1, len(response))
