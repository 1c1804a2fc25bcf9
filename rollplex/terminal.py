"""The terminal: lines in colour only where it has any, errors with what to try, progress on stderr, plans as pages.

error: job.yaml:14: unknown key `tensor_paralel`
  try: tensor_parallel
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rollplex.ir.errors import RollplexError, RunError
from rollplex.ir.plan import Plan

BUG = 70  # EX_SOFTWARE of sysexits.h


def out() -> Console:
    """Where results go; rich itself honours NO_COLOR and TERM=dumb."""
    return Console(highlight=False, soft_wrap=True)


def err() -> Console:
    """Where progress and errors go."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def show(lines: Iterable[Text], console: Console | None = None) -> None:
    """Print lines as they are: nothing is wrapped again or padded."""
    console = console or out()
    for text in lines:
        console.print(text, soft_wrap=True)


def complain(error: RollplexError) -> None:
    """Every problem with its place and what to try, on stderr."""
    console = err()
    for problem in error.problems:
        where = f"{problem.where}: " if problem.where else ""
        console.print(Text.assemble(("error: ", "bold red"), where, problem.what))
        if problem.hint:
            console.print(Text.assemble(("  try: ", "bold"), problem.hint))


def confess(error: BaseException) -> int:
    """An exception nobody foresaw is our bug: its traceback goes to a file, one line to the user. The exit status."""
    with tempfile.NamedTemporaryFile("w", prefix="rollplex-", suffix=".log", delete=False, encoding="utf-8") as log:
        log.write(f"rollplex {' '.join(sys.argv[1:])}\n\n")
        traceback.print_exception(error, file=log)
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    console = err()
    console.print(Text.assemble(("internal error: ", "bold red"), what))
    console.print(f"  this is a bug in Rollplex; the details are in {log.name}")
    return BUG


def leave_pipe() -> None:
    """The reader of our output went away (`| head`): what is still buffered goes nowhere, without a complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def page(plan: Plan, job_name: str, whole: bool) -> None:
    """The page of a plan, or its head alone."""
    from rollplex.show.page import plan_head, plan_page

    show(plan_page(plan, job_name) if whole else plan_head(plan, job_name))


def write(path: Path, text: str) -> None:
    """A file of text; RunError when it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write the plan: {error.strerror}", where=path, hint="name another file") from None


def write_html(path: Path, plan: Plan, job_name: str) -> None:
    """The page of a plan for a browser."""
    from rollplex.show.html.page import html_page

    write(path, html_page(plan, job_name))
