"""File descriptors that a list owns."""

from __future__ import annotations

import os


def close_all(fds: list[int]) -> None:
    """Close them; the list is empty afterwards."""
    while fds:
        os.close(fds.pop())
