"""Fuzz job and plan files: whatever they hold, Rollplex answers with a job, a plan, or errors that a user can act on.

    python tools/fuzz.py --minutes 60 --seed 1          findings are printed and kept in fuzz-findings/
    python tools/fuzz.py --seed 1 --only 4711           one case again, with its traceback

A case runs in a forked child with a limit on memory and a clock; a child that dies or hangs is a finding too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from fuzz_cases import JOBS, Case, Cases

from rollplex.ir.checker import check_plan
from rollplex.ir.dsl import Algorithm
from rollplex.ir.errors import RollplexError
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan, read_plan
from rollplex.ir.planned_job import job_of
from rollplex.passes.pipeline import compile_plan
from rollplex.show.page import plan_page

ROOT = Path(__file__).resolve().parent.parent
CPU_SECONDS, WALL_SECONDS = 60, 900
"""Of one case: by the CPU's clock, which others on the machine do not slow, and by the wall's, for one that sleeps."""
MEMORY_BYTES = 3 << 30
"""Beyond what the interpreter, torch and the solver have mapped at the start."""
BATCH = 100


class TooLong(BaseException):
    """A case is over its time; no `except Exception` may take it."""


def outcome(case: Case, folder: Path) -> str:
    """How a case ends: `refused`, `feasible`, .. ; anything that is raised is a finding."""
    file = folder / ("plan.json" if case.is_plan else "job.yaml")
    file.write_bytes(case.text)
    try:
        return _plan(file) if case.is_plan else _job(file, case)
    except RollplexError as error:
        check_error(error)
        return "refused"


def _plan(file: Path) -> str:
    plan = read_plan(file)
    job_of(plan)
    found = check_plan(plan)
    for violation in found:
        assert str(violation.problem)
    if not found:
        show(plan)
    return "violates" if found else "accepted"


def _job(file: Path, case: Case) -> str:
    job = load_job(file, case.overrides)
    for line in (job.describe(), *job.notes()):
        assert line
    plan = compile_plan(algorithm(ROOT, case.algorithm), job)
    show(plan)
    return "feasible" if plan.feasible else "infeasible"


def show(plan: Plan) -> None:
    """The page and the JSON of a plan can be written."""
    assert plan_page(plan)
    assert plan.to_json()


def check_error(error: RollplexError) -> None:
    """Every problem says where and what."""
    assert error.problems, "an error without a problem"
    for problem in error.problems:
        assert problem.what.strip(), f"an empty message: {problem!r}"
        assert problem.where, f"no place: {problem.what}"


# ---- children


def limit() -> None:
    """Bound the memory and the time of this process."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))

    def too_long(number: int, _frame: FrameType | None) -> None:
        limit = f"{CPU_SECONDS} s of CPU" if number == signal.SIGPROF else f"{WALL_SECONDS} s"
        raise TooLong(f"more than {limit}")

    signal.signal(signal.SIGALRM, too_long)
    signal.signal(signal.SIGPROF, too_long)


def child(cases: Cases, seed: int, numbers: range, pipe: int) -> None:
    """Run cases, a line of JSON each: `number` when it begins, `end` and perhaps `what` when it is over."""
    limit()
    with os.fdopen(pipe, "w", buffering=1) as out, tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            print(json.dumps({"number": number}), file=out)
            case = cases.make(seed, number)
            print(json.dumps({"kind": case.kind, **run(case, Path(folder))}), file=out)


def clock(cpu_seconds: int, wall_seconds: int) -> None:
    """Start both clocks, or stop them with zeros."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.alarm(wall_seconds)


def run(case: Case, folder: Path) -> dict[str, Any]:
    """One case; a finding has `what`."""
    clock(CPU_SECONDS, WALL_SECONDS)
    try:
        return {"end": outcome(case, folder)}
    except (Exception, TooLong) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {str(error)[:300]} ({Path(place.filename).name}:{place.lineno})"
        return {"end": "finding", "what": what}
    finally:
        clock(0, 0)


def batch(cases: Cases, seed: int, numbers: range) -> Iterator[dict[str, Any]]:
    """The ends of a batch run in a child; a child that dies takes the blame for its last case."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reader)
        code = 1
        try:
            child(cases, seed, numbers, writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    began: dict[str, Any] = {}
    with os.fdopen(reader) as lines:
        for line in lines:
            message = json.loads(line)
            if "number" in message:
                began = message
            else:
                yield {**began, **message}
                began = {}
    _, status = os.waitpid(pid, 0)
    if status:
        kind = cases.make(seed, began["number"]).kind if began else "?"
        yield {**began, "kind": kind, "end": "finding", "what": f"the process died, status {status}"}


# ---- the run


@cache
def algorithm(root: Path, name: str) -> Algorithm:
    """The algorithm of an example."""
    return load_algorithm(root / f"examples/{name}.py")


def good_plans(root: Path) -> tuple[dict, ...]:
    """Plans of the example jobs, and of one of them under every schedule, small enough that every part is hit."""
    one, host = "qwen2_5_vl_32b_h800x8", "shapes_host"
    rows = [(one, (f"schedule={kind}", "workload.prompts=2")) for kind in ("rollplex", "serial", "naive")]
    rows += [(name, ("workload.prompts=2",) if name == host else ()) for name in JOBS if name != one]
    files = ((root / f"examples/jobs/{job}.yaml", JOBS[job], overrides) for job, overrides in rows)
    plans = (compile_plan(algorithm(root, name), load_job(file, overrides)) for file, name, overrides in files)
    return tuple(json.loads(plan.to_json()) for plan in plans)


def main() -> None:
    """Fuzz for the minutes asked for; exit 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="run this case alone, and print what it is")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    asked = parser.parse_args()
    cases = Cases(ROOT, good_plans(ROOT))
    if asked.only is not None:
        again(cases.make(asked.seed, asked.only))
        return
    sys.exit(fuzz(cases, asked.seed, asked.start, asked.minutes, asked.out))


def again(case: Case) -> None:
    """One case in this process, with its traceback."""
    print(case.kind, *case.overrides, case.text[:4000].decode(errors="replace"), sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        print(outcome(case, Path(folder)))


def fuzz(cases: Cases, seed: int, start: int, minutes: float, out: Path) -> int:
    """Batches until the time is up; the counts by kind and end are printed at the end."""
    counts: Counter[tuple[str, str]] = Counter()
    seen: Counter[str] = Counter()
    ends, number = time.monotonic() + 60 * minutes, start
    gc.freeze()
    while time.monotonic() < ends:
        for end in batch(cases, seed, range(number, number + BATCH)):
            counts[end["kind"], end["end"]] += 1
            if end["end"] == "finding":
                note(cases, seed, int(end["number"]), end["what"], out, seen)
        number += BATCH
    print(f"\nseed {seed}, cases {start} to {number - 1}, {minutes:g} minutes, {sum(seen.values())} findings")
    for (kind, end), count in sorted(counts.items()):
        print(f"  {kind:<12} {end:<10} {count:7d}")
    return 1 if seen else 0


def note(cases: Cases, seed: int, number: int, what: str, out: Path, seen: Counter[str]) -> None:
    """Print a finding and keep the first of each sort as a file."""
    seen[what] += 1
    if seen[what] == 1:
        case = cases.make(seed, number)
        print(f"finding: seed {seed} case {number} ({case.kind}): {what}", flush=True)
        out.mkdir(exist_ok=True)
        (out / f"{seed}-{number}.{'json' if case.is_plan else 'yaml'}").write_bytes(case.text)


if __name__ == "__main__":
    main()
