"""How many of the public MiniMalloc instances the compiler's static-offset model packs in 60 s on two cores.

    python benchmarks/minimalloc.py DIR [--seconds 60] [--only ABC] [-o benchmarks/results/minimalloc.md]

DIR holds A.1048576.csv to K.1048576.csv (id,lower,upper,size), from github.com/google/minimalloc, folder
benchmarks/challenging, Apache-2.0; they are not part of this project. Each asks for a packing into 1,048,576 units,
which is the load of most of them: there is no room to lose. The model is that of `rollplex/passes/offsets.py`; only the
limit differs (wall time, a portfolio of workers, where the compiler has one worker and deterministic time).
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ortools.sat.python import cp_model

from rollplex.passes.offsets import FAMILIES, Model
from rollplex.passes.offsets_data import Item, load, overlaps
from rollplex.passes.solver import constrain

CAPACITY = 1_048_576
CORES = 2
WORKERS = 8
"""Strategies of CP-SAT's portfolio; they take turns on the two cores."""


@dataclass(frozen=True)
class Outcome:
    """One instance: its name, buffers and load, and whether a packing was found and checked."""

    name: str
    buffers: int
    load_share: float
    packed: bool
    seconds: float


def read(path: Path) -> list[Item]:
    """The buffers of a file."""
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [Item(row["id"], int(row["size"]), ((int(row["lower"]), int(row["upper"])),)) for row in rows]


def solve(name: str, items: Sequence[Item], seconds: float) -> Outcome:
    """Search for a packing into the capacity, in the sizes' greatest common unit; check it from scratch."""
    began = time.perf_counter()
    unit = math.gcd(CAPACITY, *(item.size for item in items))
    scaled = [Item(i.name, i.size // unit, i.spans) for i in items]
    model = constrain(Model(scaled, CAPACITY // unit), FAMILIES)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = WORKERS
    solver.parameters.max_time_in_seconds = max(0.1, seconds - (time.perf_counter() - began))
    status = solver.solve(model.cp)
    packed = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    took = time.perf_counter() - began
    if packed:
        check(scaled, [int(solver.value(a)) for a in model.at], CAPACITY // unit)
    return Outcome(name, len(items), load(items) / CAPACITY, packed, took)


def check(items: Sequence[Item], offsets: Sequence[int], capacity: int) -> None:
    """Fail unless every buffer is inside and no two overlap in time and address."""
    assert all(0 <= a <= capacity - i.size for a, i in zip(offsets, items, strict=True))
    for i, j in overlaps(items):
        assert offsets[i] + items[i].size <= offsets[j] or offsets[j] + items[j].size <= offsets[i]


def page(found: Sequence[Outcome], seconds: float, command: str) -> str:
    """The result as a file: command, versions, table."""
    rows = "\n".join(
        f"| {o.name} | {o.buffers} | {100 * o.load_share:.1f} % | {'packed' if o.packed else 'no packing found'} |"
        f" {o.seconds:.1f} |"
        for o in found
    )
    return f"""# Static offsets: MiniMalloc's instances

{sum(o.packed for o in found)} of {len(found)} packed, {seconds:g} s each, {WORKERS} workers of CP-SAT on {CORES} cores.

    {command}

Instances: github.com/google/minimalloc, benchmarks/challenging, Apache-2.0, not part of this project. Capacity
{CAPACITY:,} units; load is the most that is alive at once. Every packing is checked from scratch.
Python {platform.python_version()}, OR-Tools {version("ortools")}, {platform.machine()}, wall time: on another machine,
or beside other work, an instance near the limit may fall to the other side.

| instance | buffers | load | outcome | seconds |
| --- | --- | --- | --- | --- |
{rows}
"""


def main(arguments: Sequence[str]) -> int:
    """Run, print a line an instance, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default="ABCDEFGHIJK")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    found: list[Outcome] = []
    for name in options.only:
        path = options.folder / f"{name}.{CAPACITY}.csv"
        if not path.exists():
            parser.error(f"{path} is not there: take it from github.com/google/minimalloc, benchmarks/challenging")
        found.append(one := solve(name, read(path), options.seconds))
        print(f"{name}  {one.buffers} buffers  {'packed' if one.packed else '-':<8} {one.seconds:6.1f} s", flush=True)
    print(f"{sum(o.packed for o in found)} of {len(found)} packed")
    if options.output:
        command = f"python benchmarks/minimalloc.py DIR --seconds {options.seconds:g}"
        options.output.write_text(page(found, options.seconds, command), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
