"""Checkpoints of a run: whole or not there, told apart from foreign ones, and pruned.

checkpoints/step-12/checkpoint.json             step, plan, metrics so far, facts and checksums of every process
                    train-0.safetensors ..      one file a process
checkpoints/step-16.partial/                    being written; renamed when all of it is on disk

The state of step 12 is that after 12 iterations. checkpoint.json ends in a checksum of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rollplex.backends.carried import FileRecord
from rollplex.ir.errors import Problem, RunError

FOLDER, FILE = "checkpoints", "checkpoint.json"
_WHOLE = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """After `step` iterations: the plan it belongs to, the metrics of every iteration, what each process noted."""

    step: int
    plan: str
    metrics: list[dict[str, float]]
    processes: dict[str, dict[str, Any]]

    @property
    def files(self) -> list[FileRecord]:
        """The file of every process."""
        return [FileRecord(*noted["file"]) for noted in self.processes.values()]


def write(
    out_dir: Path, step: int, plan: str, metrics: list[dict[str, float]], keep: Callable[[Path], Mapping[str, Any]]
) -> Checkpoint:
    """Write a checkpoint; `keep(folder)` has every process write its file there, and returns what each noted.

    RunError when it cannot be written; then nothing of it stays.
    """
    place = out_dir / FOLDER / f"step-{step}"
    partial = place.with_name(f"{place.name}.partial")
    try:
        partial.mkdir(parents=True)
        made = Checkpoint(step, plan, metrics, dict(keep(partial)))
        _write_json(partial / FILE, asdict(made))
        _sync(partial)
        shutil.rmtree(place, ignore_errors=True)  # one of this step that was found broken
        partial.rename(place)
        _sync(place.parent)
    except OSError as err:
        hint = "free space on this disk, then go on from the checkpoint before with --resume"
        where = err.filename or partial
        raise RunError(f"cannot write the checkpoint: {err.strerror}", where=where, hint=hint) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return made


def noted(folder: Path, process: str) -> dict[str, Any]:
    """What one process noted, of a checkpoint that was found whole."""
    return json.loads((folder / FILE).read_text("utf-8"))["processes"][process]


def prune(out_dir: Path, kept: int) -> None:
    """Remove all but the newest `kept`."""
    for _, path in _found(out_dir)[kept:]:
        shutil.rmtree(path, ignore_errors=True)


def clear_partial(out_dir: Path) -> None:
    """Remove what a run that died was writing."""
    for path in (out_dir / FOLDER).glob("*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def newest(out_dir: Path, plan: str) -> tuple[Path | None, Checkpoint | None, list[Problem]]:
    """The newest whole checkpoint of this plan, and what is wrong with newer ones.

    RunError when there are checkpoints and none of them can be used.
    """
    skipped: list[Problem] = []
    for step, path in _found(out_dir):
        found = _read(path, step, plan)
        if isinstance(found, Checkpoint):
            return path, found, skipped
        skipped.append(Problem(found, str(path)))
    if skipped:
        hint = f"restore one of them, or delete {out_dir / FOLDER} to begin again from step 0"
        raise RunError(*skipped[:-1], Problem(skipped[-1].what, skipped[-1].where, hint))
    return None, None, []


def _found(out_dir: Path) -> list[tuple[int, Path]]:
    """Steps and directories, newest first."""
    folder = out_dir / FOLDER
    paths = folder.iterdir() if folder.is_dir() else []
    return sorted(((int(m[1]), path) for path in paths if (m := _WHOLE.fullmatch(path.name))), reverse=True)


def _read(path: Path, step: int, plan: str) -> Checkpoint | str:
    """The checkpoint, or what is wrong with it."""
    try:
        data = json.loads((path / FILE).read_text("utf-8"))
        signed = data.pop("sha256")
        made = Checkpoint(**data)
    except OSError as err:
        return f"{FILE}: {err.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{FILE} is cut off or not ours"
    if _signature(data) != signed:
        return f"{FILE} is not what was written"
    if made.step != step:
        return f"it is of step {made.step}"
    if made.plan != plan:
        return "it belongs to another plan"
    return next(_damages(path, made), made)


def _damages(path: Path, made: Checkpoint) -> Iterator[str]:
    with ThreadPoolExecutor(max_workers=8) as pool:  # hashing releases the interpreter's lock
        yield from filter(None, pool.map(lambda record: record.wrong(path), made.files))


def _write_json(path: Path, data: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as out:
        json.dump({**data, "sha256": _signature(data)}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def _signature(data: Mapping[str, Any]) -> str:
    return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    """A rename is on disk when its directory is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
