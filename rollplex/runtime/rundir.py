"""The directory of a run: new or empty, or a run to be resumed; locked while a run goes on; and what it will hold.

metrics.jsonl   one line an iteration, written as it ends      trace.json     for Perfetto; trace-from-12.json, resumed
report.json     times, bytes, rewards                          reward.png     the curve
checkpoints/    what the run can go on from                    plan.json      what was run
final/          the actor as a Hugging Face directory          logs/          one file an engine process
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollplex.ir.errors import RunError
from rollplex.runtime.resume import PLAN

LOCK = ".lock"


@contextmanager
def run_directory(path: Path, resume: bool = False) -> Iterator[Path]:
    """The directory, made where needed, locked until the block ends (the kernel unlocks it if this process dies)."""
    _make(path)
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(fd, path)
        _refuse_used(path, resume)
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
        owner = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        hint = "wait for it to end, or name another directory"
        raise RunError(f"another run is using this directory (pid {owner})", where=path, hint=hint) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def _refuse_used(path: Path, resume: bool) -> None:
    found = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
    if not found or (resume and PLAN in found):
        return
    held = ", ".join(found[:4])
    if resume:
        what = f"this is not the directory of a run: it has no {PLAN}, and holds {held}"
        raise RunError(what, where=path, hint="name the directory of the run to resume, or a new one")
    hint = "go on with its run with --resume, name a new directory, or delete this one if its run is not needed"
    raise RunError(f"the run directory is not empty: it holds {held}", where=path, hint=hint)
