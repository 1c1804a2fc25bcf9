"""Text of a file that a user named: bounded, so that a device or a mistaken path cannot fill the memory.

read_text(Path("/dev/zero"))     ValueError: more than 64 MiB
"""

from __future__ import annotations

from pathlib import Path

MOST_BYTES = 64 << 20


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The file's UTF-8 text. OSError when it cannot be read, ValueError when it is too large or no UTF-8."""
    with path.open("rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise ValueError(f"more than {most >> 20} MiB")
    return found.decode("utf-8")
