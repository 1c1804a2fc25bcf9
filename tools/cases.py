"""Print what the product says of every public case, and the confusion matrix of observed against predicted.

python tools/cases.py            exit 1 when one of them is a false `fits`, or is not what tests/cases/table.py expects
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from cases.judge import confusion, outcomes


def main() -> None:
    """One line a case, then the matrix."""
    found = outcomes()
    for o in found:
        mark = "" if o.verdict == o.case.verdict else f"   expected {o.case.verdict}"
        print(f"{o.case.file:<36} observed {o.case.observed:<8} predicted {o.verdict}{mark}")
    print()
    print("\n".join(confusion(found)))
    sys.exit(1 if any(o.false_fits or o.verdict != o.case.verdict for o in found) else 0)


if __name__ == "__main__":
    main()
