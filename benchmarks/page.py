"""What every page of measurements has: a table, and where and with what it was measured."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def command() -> str:
    """What was called, by module from the root of the repository."""
    return " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])


def measured_with(*packages: str) -> str:
    """Versions and machine, as they are now; the load is that of the last minute."""
    versions = ", ".join([f"Python {platform.python_version()}", *map(_versioned, packages)])
    cores = len(os.sched_getaffinity(0))
    return f"{versions}; {platform.system()} {platform.machine()}, {cores} CPUs, load {os.getloadavg()[0]:.1f}"


def _versioned(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown, a line each; all columns but the first are figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
