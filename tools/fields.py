"""Write the table of docs/plan.md that says which rules refuse an edit of which field of a plan.

python tools/fields.py [PLAN ..]     walk the plans of tests/mutants/plans.py (all: minutes) and write the table
python tools/fields.py --print ..    print it instead
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from mutants.fields import BEGIN, END, PAGE, Rows, note, table, walk
from mutants.plans import PLANS


def rows(names: list[str]) -> Rows:
    """The fields of these plans; exits where edits pass without a reason."""
    found: Rows = {}
    survivors: list[str] = []
    for name in names:
        for edit, rules, why in walk(name):
            if not rules and not why:
                survivors.append(f"{name}: nothing refuses {edit}")
                print(survivors[-1], file=sys.stderr)
            note(found, edit, rules, why)
        print(f"{name}: {len(found)} fields so far", file=sys.stderr)
    if survivors:
        sys.exit(f"{len(survivors)} edits pass without a reason")
    return found


def main() -> None:
    """Walk, and write or print."""
    names = [a for a in sys.argv[1:] if a != "--print"]
    text = "\n".join(table(rows(names or list(PLANS)))) + "\n"
    if "--print" in sys.argv:
        print(text, end="")
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
