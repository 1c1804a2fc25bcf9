"""The findings of `rollplex doctor`, part by part."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Protocol

from rich.text import Text

from rollplex.show.text import WIDTH, line

_STYLE = {"ok": "green", "missing": "yellow", "broken": "bold red"}


class Finding(Protocol):
    """What is printed of a finding."""

    @property
    def part(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def todo(self) -> str: ...


def health_lines(findings: Iterable[Finding], width: int = WIDTH) -> list[Text]:
    """One line a finding; after an arrow what to do, where there is something to do."""
    lines: list[Text] = []
    part = ""
    for f in findings:
        shown, part = "" if f.part == part else f.part, f.part
        head = line((f"{shown:<14}", "bold"), f"{f.name:<16}", (f"{f.state:<9}", _STYLE[f.state]))
        todo = f.todo if f.state != "ok" else ""
        text = f"{f.detail} -> {todo}" if todo else f.detail
        first, *rest = textwrap.wrap(text, width - len(head), break_on_hyphens=False) or [""]
        lines += [line(head, first), *(line(" " * len(head) + more) for more in rest)]
    return lines
