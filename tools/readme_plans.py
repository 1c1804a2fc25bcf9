"""Put the plans that the README shows into it, as the program prints them today.

python tools/readme_plans.py            write README.md
python tools/readme_plans.py --check    exit 1 when it is not up to date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rollplex import api
from rollplex.show.page import plan_page

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
ALGORITHM, JOB = "examples/grpo.py", "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"

# Block of the README -> overrides of the job, and how many groups of lines of the page are shown (all of them: 0).
BLOCKS: dict[str, tuple[tuple[str, ...], int]] = {"plan": ((), 0), "naive": (("schedule=naive",), 3)}


def printed(overrides: tuple[str, ...], groups: int) -> str:
    """The page of the example job, or its first groups of lines."""
    plan = api.compile_files(str(ROOT / ALGORITHM), ROOT / JOB, overrides).plan
    page = "\n".join(text.plain for text in plan_page(plan, Path(JOB).name))
    return "\n\n".join(page.split("\n\n")[: groups or None])


def filled(text: str) -> str:
    """The README with every block filled in."""
    for name, (overrides, groups) in BLOCKS.items():
        block = f"<!-- {name} -->\n```text\n{printed(overrides, groups)}\n```\n<!-- /{name} -->"
        text, found = re.subn(rf"<!-- {name} -->\n.*?<!-- /{name} -->", lambda _, b=block: b, text, flags=re.DOTALL)
        assert found == 1, f"README.md has {found} blocks {name}"
    return text


def main() -> None:
    """Write, or compare."""
    text = README.read_text("utf-8")
    if "--check" not in sys.argv[1:]:
        README.write_text(filled(text), "utf-8")
    elif text != filled(text):
        sys.exit("README.md is not up to date: run python tools/readme_plans.py")


if __name__ == "__main__":
    main()
