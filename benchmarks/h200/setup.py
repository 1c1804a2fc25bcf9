"""What plans read: models, data and weights are made where they are missing, and plans find them in this checkout.

python -m benchmarks.h200.setup PLANS [--into DIR]       table.py does it by itself; weights are drawn on a GPU
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.h200 import make
from benchmarks.h200.plans import HERE, arrived
from benchmarks.h200.running import called
from rollplex.ir.errors import RollplexError, RunError
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan, read_plan


@dataclass(frozen=True)
class Ready:
    """A plan in a file of its own, whose paths are those of this checkout; `digest` is that of its text."""

    name: str
    file: Path
    digest: str

    @cached_property
    def plan(self) -> Plan:
        return read_plan(self.file)

    @property
    def job(self) -> Job:
        return Job.model_validate(self.plan.job)


def prepare(folder: Path, into: Path) -> list[Ready]:
    """The folder's plans, in order; RunError where it has none."""
    if not folder.is_dir() or not any(folder.glob("*.json")):
        hint = "python -m benchmarks.h200.plans DIR"
        raise RunError("there is no plan in this directory", where=folder, hint=hint)
    into.mkdir(parents=True, exist_ok=True)
    return [_arrive(file, into) for file in sorted(folder.glob("*.json"))]


def _arrive(file: Path, into: Path) -> Ready:
    text, place = file.read_text(encoding="utf-8"), into / file.name
    place.write_text(arrived(text), encoding="utf-8")
    return Ready(file.stem, place, hashlib.sha256(text.encode()).hexdigest()[:16])


def fill(jobs: Iterable[Job]) -> None:
    """Make what is not there, each thing once; RunError where something is missing that is not ours.

    All models, which take no time: a job that is calibrated reads one, and is no plan.
    """
    for size in make.SIZES:
        if not (HERE / size / "config.json").exists():
            make.model(size)
    for job in jobs:
        model, data = Path(job.model.name), Path(job.run.data or "")
        if not data.is_file():
            if data.parent != HERE / "data":
                raise RunError("there is no such data set", where=data, hint="compile with --data, a name of make.py")
            make.data(data.stem)
        if job.run.weights and not (Path(job.run.weights) / "config.json").exists():  # written last
            called(["benchmarks.h200.weights", str(model), job.run.weights], Path(f"{job.run.weights}.log"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--into", type=Path, default=Path("/dev/shm/runs/plans"))
    asked = parser.parse_args()
    try:
        ready = prepare(asked.folder, asked.into)
        fill(each.job for each in ready)
        for each in ready:
            print(f"{each.name}: {each.file}")
    except RollplexError as err:
        raise SystemExit(str(err)) from None


if __name__ == "__main__":
    main()
