"""The plans that table.py runs on an H200, compiled where OR-Tools is.

python -m benchmarks.h200.plans DIR [--data text_mixed] [--weights /dev/shm/w3b] [KEY=VALUE ..]
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


def main() -> None:
    """One file a schedule, in the order in which they are to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", default="text_mixed")
    parser.add_argument("--weights", default="/dev/shm/w3b")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    data = (f"run.data={HERE / 'data' / asked.data}.jsonl", f"run.weights={asked.weights}")
    for number, (name, keys) in enumerate(SCHEDULES.items()):
        plan = compile_files(str(GRPO), HERE / "job_3b.yaml", (*data, *keys, *asked.overrides)).plan
        (asked.folder / f"{number} {name}.json").write_text(plan.to_json(), encoding="utf-8")
        print(f"{name}: peak {plan.summary.peak_hbm_bytes / 2**30:.1f} GiB, {plan.summary.times.step_s:.2f} s a step")


if __name__ == "__main__":
    main()
