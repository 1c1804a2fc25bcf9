"""Run every check in turn, go on after a failure, and end with a summary. Standard library only.

python tools/check.py            lint, format, types, import directions, tests
python tools/check.py --static   all but the tests
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

STATIC: tuple[tuple[str, ...], ...] = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("pyright",),
    ("lint-imports",),
)
# Two at a time of those that start engine processes: up to eight each, which wait for each other. Some tests have the
# machine to themselves: they say within which time a death is noticed.
TESTS = (
    ("pytest", "-n", "logical", "--dist", "worksteal", "-m", "not processes and not alone"),
    ("pytest", "-n", "2", "--dist", "loadgroup", "-m", "processes"),
    ("pytest", "-m", "alone"),
)


def run(command: tuple[str, ...]) -> tuple[bool, float]:
    """Run one tool of the environment in the checkout; whether it passed, and its seconds."""
    print(f"\n==> {' '.join(command)}", flush=True)
    began = time.monotonic()
    # A child must find the environment's own tools first, whatever was activated outside.
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}", "VIRTUAL_ENV": str(BIN.parent)}
    code = subprocess.call([str(BIN / command[0]), *command[1:]], cwd=ROOT, env=env)
    return code == 0, time.monotonic() - began


def main() -> None:
    """Exit 0 when every check passed, else 1."""
    commands = STATIC if "--static" in sys.argv[1:] else (*STATIC, *TESTS)
    results = [(" ".join(c), *run(c)) for c in commands]
    print()
    for name, passed, seconds in results:
        print(f"{'ok' if passed else 'FAILED':<7} {name:<56} {seconds:6.1f} s")
    sys.exit(0 if all(passed for _, passed, _ in results) else 1)


if __name__ == "__main__":
    main()
