"""The directory of a run: new or empty, locked while the run goes on, and what it will hold.

metrics.jsonl   one line an iteration, written as it ends      trace.json     for Perfetto
report.json     times, bytes, rewards                          reward.png     the curve
final/          the actor as a Hugging Face directory          logs/          one file an engine process
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollplex.ir.errors import RunError

LOCK = ".lock"


@contextmanager
def run_directory(path: Path) -> Iterator[Path]:
    """The directory, made where needed, locked until the block ends (the kernel unlocks it if this process dies)."""
    _make(path)
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(fd, path)
        _refuse_used(path)
        yield path
    finally:
        os.close(fd)


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        hint = "name another directory"
        raise RunError(f"cannot make the run directory: {err.strerror}", where=path, hint=hint) from None


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        hint = "wait for it to end, or name another directory"
        raise RunError("another run is using this directory", where=path, hint=hint) from None


def _refuse_used(path: Path) -> None:
    found = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
    if found:
        what = f"the run directory is not empty: it holds {', '.join(found[:4])}"
        raise RunError(what, where=path, hint="name a new directory, or delete this one if its run is not needed")
