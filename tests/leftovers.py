"""What a run could leave behind, to be compared before and after."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from processes import children


def leftovers(out: Path) -> dict[str, Any]:
    """What a run could leave behind: children, descriptors of this process, shared memory, sockets, shared pages."""
    gc.collect()  # what earlier tests dropped is not this run's
    return {
        "children": children(),
        "fds": sorted(
            link for link in map(_target, os.listdir("/proc/self/fd")) if "memfd" in link or "socket" in link
        ),
        "shm": sorted(os.listdir("/dev/shm")),
        "sockets": [path for path in out.rglob("*") if path.is_socket()],
        "pages": [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:rollplex" in line],
    }


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
