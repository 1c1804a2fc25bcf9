"""The plans that table.py runs on H200s, compiled where OR-Tools is.

python -m benchmarks.h200.plans DIR [--job job_3b_x2] [--data text_mixed] [--weights /dev/shm/w3b] [KEY=VALUE ..]

A share is solved where the keys name a calibration. On two GPUs rollout at TP 1 and, matched, at TP 2, for which a
calibration of TP 1 is none.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rollplex.api import compile_files

HERE = Path(__file__).resolve().parent
GRPO = HERE.parent.parent / "examples" / "grpo.py"
SCHEDULES: dict[str, tuple[str, ...]] = {
    "serial": ("schedule=serial",),
    "rollplex, MPS default": ("schedule=rollplex",),
    "rollplex, 60% of the SMs": ("schedule=rollplex", "sharing.kind=fixed", "sharing.share=0.6"),
    "rollplex, solved share": ("schedule=rollplex", "sharing.kind=solved"),
    "streamed": ("schedule=streamed",),
}
MATCHED = "roles.actor.rollout.tensor_parallel=2"
JOBS: dict[str, dict[str, tuple[str, ...]]] = {
    "job_3b": SCHEDULES,
    "job_3b_x2": {
        **SCHEDULES,
        "serial, rollout TP 2": ("schedule=serial", MATCHED),
        "rollplex, rollout TP 2": ("schedule=rollplex", MATCHED),
    },
}
CALIBRATION = "cluster.calibration="


def main() -> None:
    """One file a schedule, in the order in which they are to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--job", choices=JOBS, default="job_3b")
    parser.add_argument("--data", default="text_mixed")
    parser.add_argument("--weights", default="/dev/shm/w3b")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_intermixed_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    data = (f"run.data={HERE / 'data' / asked.data}.jsonl", f"run.weights={asked.weights}")
    measured = any(key.startswith(CALIBRATION) for key in asked.overrides)
    for number, (name, keys) in enumerate(JOBS[asked.job].items()):
        if "sharing.kind=solved" in keys and not measured:
            print(f"{name}: not without {CALIBRATION}FILE")
            continue
        own = [key for key in asked.overrides if MATCHED not in keys or not key.startswith(CALIBRATION)]
        plan = compile_files(str(GRPO), HERE / f"{asked.job}.yaml", (*data, *keys, *own)).plan
        (asked.folder / f"{number} {name}.json").write_text(plan.to_json(), encoding="utf-8")
        print(f"{name}: peak {plan.summary.peak_hbm_bytes / 2**30:.1f} GiB, {plan.summary.times.step_s:.2f} s a step")


if __name__ == "__main__":
    main()
