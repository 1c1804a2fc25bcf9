"""Values that are there group by group: under `streamed`, `rollout[3]` are the responses to every rank's fourth group.

    part("rollout", 3) == "rollout[3]"     whole("rollout[3]") == "rollout"     group_of("rollout[3]") == 3

The part has a row for each data-parallel rank, in their order: the m-th of the prompts that the rank works on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = re.compile(r"(.+)\[(\d+)\]")


def part(name: str, group: int) -> str:
    """The name of a value's part for one group."""
    return f"{name}[{group}]"


def whole(name: str) -> str:
    """The value that a name is, or is a part of."""
    found = _PART.fullmatch(name)
    return found[1] if found else name


def group_of(name: str) -> int | None:
    """The group that a part is for; None for a whole value."""
    found = _PART.fullmatch(name)
    return int(found[2]) if found else None


def wholes(names: Iterable[str]) -> tuple[str, ...]:
    """The values that names are or are parts of, each once."""
    return tuple(dict.fromkeys(whole(name) for name in names))
