"""The plans that table.py runs on H200s, compiled where OR-Tools is; they may be carried to another checkout.

python -m benchmarks.h200.plans DIR [--job job_3b_x2] [--data text_mixed] [--weights /dev/shm/w3b] [KEY=VALUE ..]
python -m benchmarks.h200.plans DIR --job job_7b run.steps=3 workload.frames=0         states stream from the host
python -m benchmarks.h200.plans DIR --job job_x2                                       DIR/soak.json, of two GPUs

The actor's prefix runs with its group (`prefix_saved: group` of the jobs) and only the reference's runs beside decode,
but in the streamed schedule and where a name says so. A share is solved where the keys name a calibration. On two GPUs
rollout at TP 1 and, matched, at TP 2, for which a calibration of TP 1 is none. The soak is matched: both engines sum
over both GPUs at the same time. What is measured of a plan is kept while its file is: where a calibration comes later,
--only 3 --only 5 writes the plans that it solves.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.h200 import make
from rollplex.api import compile_files
from rollplex.ir.errors import RollplexError, RunError
from rollplex.ir.plan import Plan

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GRPO = ROOT / "examples" / "grpo.py"
Keys = dict[str, tuple[str, ...]]
EARLY = "roles.actor.prefix_saved=dropped"  # beside decode, and made again before its backward
SCHEDULES: Keys = {
    "0 serial": ("schedule=serial",),
    "1 rollplex, MPS default": ("schedule=rollplex",),
    "2 rollplex, 60% of the SMs": ("schedule=rollplex", "sharing.kind=fixed", "sharing.share=0.6"),
    "3 rollplex, solved share": ("schedule=rollplex", "sharing.kind=solved"),
    "4 streamed": ("schedule=streamed", EARLY),
    "5 rollplex, solved share, both prefixes early": ("schedule=rollplex", "sharing.kind=solved", EARLY),
}
MATCHED = "roles.actor.rollout.tensor_parallel=2"
MATCHING: Keys = {
    "6 serial, rollout TP 2": ("schedule=serial", MATCHED),
    "7 rollplex, rollout TP 2": ("schedule=rollplex", MATCHED),
}
OFFLOADED = {name: SCHEDULES[name] for name in ("0 serial", "1 rollplex, MPS default")}
SOAK = "soak"
LONG = ("schedule=rollplex", MATCHED, "run.steps=200", "run.step_timeout_s=120", "workload.response_tokens=96")


@dataclass(frozen=True)
class Set:
    """Plans of a job in the order in which they run; its data set, and where its weights are, "" for drawn ones."""

    plans: Keys
    data: str = "text_mixed"
    weights: str = "/dev/shm/w3b"


JOBS = {
    "job_3b": Set(SCHEDULES),
    "job_3b_x2": Set(SCHEDULES | MATCHING),
    "job_7b": Set(OFFLOADED, weights="/dev/shm/w7b"),
    "job_x2": Set({SOAK: LONG}, data="text", weights=""),
}
CALIBRATION = "cluster.calibration="
PATIENT = "run.step_timeout_s=180"  # a step or a start that hangs, told with where everyone is before a command is over
PLACE = "@ROOT@"  # stands in a plan for the checkout that it runs in


def carried(plan: Plan) -> str:
    """The plan's text, without the place of this checkout."""
    return plan.to_json().replace(f"{ROOT}/", f"{PLACE}/")


def arrived(text: str) -> str:
    """That text in this checkout."""
    return text.replace(f"{PLACE}/", f"{ROOT}/")


def chosen(every: Keys, only: Sequence[str]) -> Keys:
    """The plans of these numbers, all where there are none; RunError for a number that no plan has."""
    numbers = {name.partition(" ")[0]: name for name in every}
    if unknown := sorted({*only} - numbers.keys()):
        raise RunError(f"there is no plan {', '.join(unknown)}", where="--only", hint=f"one of {', '.join(numbers)}")
    return {name: every[name] for number, name in numbers.items() if not only or number in only}


def main() -> None:
    """One file a plan, named in the order in which they are to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--job", choices=JOBS, default="job_3b")
    parser.add_argument("--data", help="a data set of make.py (default: the job's)")
    parser.add_argument("--weights", help="a directory of weights (default: the job's)")
    only = "the plan of this number; others stay as they are"
    parser.add_argument("--only", action="append", default=[], metavar="N", help=only)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_intermixed_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for size in make.SIZES:
        make.model(size)
    job = JOBS[asked.job]
    weights = job.weights if asked.weights is None else asked.weights
    given = (
        f"run.data={HERE / 'data' / (asked.data or job.data)}.jsonl",
        PATIENT,
        *([f"run.weights={weights}"] * bool(weights)),
    )
    measured = any(key.startswith(CALIBRATION) for key in asked.overrides)
    for name, keys in chosen(job.plans, asked.only).items():
        if "sharing.kind=solved" in keys and not measured:
            print(f"{name}: not without {CALIBRATION}FILE")
            continue
        own = [key for key in asked.overrides if MATCHED not in keys or not key.startswith(CALIBRATION)]
        plan = compile_files(str(GRPO), HERE / f"{asked.job}.yaml", (*given, *keys, *own)).plan
        if not plan.feasible:
            over = f"{name} has a peak of {plan.summary.peak_hbm_bytes / 2**30:.1f} GiB, more than a GPU has"
            raise RunError(over, where=f"{asked.job}.yaml", hint="rollplex compile tells what would fit")
        (asked.folder / f"{name}.json").write_text(carried(plan), encoding="utf-8")
        print(f"{name}: peak {plan.summary.peak_hbm_bytes / 2**30:.1f} GiB, {plan.summary.times.step_s:.2f} s a step")


if __name__ == "__main__":
    try:
        main()
    except RollplexError as err:
        raise SystemExit(str(err)) from None
