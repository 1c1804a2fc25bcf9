"""Take every constraint family out of every solver, swap every two objectives, and print which test notices and how.

residency    without (6) fetches                        an assignment: exposed seconds 3, by enumeration 9
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from oracles import ORACLES, catches  # pyright: ignore[reportMissingImports]


def main() -> int:
    """Print the table; 1 if a change goes unnoticed."""
    missed = 0
    for oracle in ORACLES:
        for _, search in catches(oracle):
            caught = search()
            missed += not caught.how
            print(f"{caught.solver:<12} {caught.change:<62} {caught.how or 'NOTHING NOTICES'}", flush=True)
    print(f"{missed} unnoticed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
