"""Values that are there in parts: group by group under `streamed`, round by round where groups are sampled again.

    part("rollout", 3) == "rollout[3]"      whole("rollout[3]") == "rollout"     group_of("rollout[3]") == 3
    of_round("rollout", 1) == "rollout@1"   whole("rollout@1") == "rollout"      round_of("rollout@1") == 1

`rollout[3]` are the responses to every rank's fourth group: a row for each data-parallel rank, in their order.
`rollout@1` are those that the second round samples, of whatever prompts; the last round completes `rollout` itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART, _ROUND = re.compile(r"(.+)\[(\d+)\]"), re.compile(r"(.+)@(\d+)")


def part(name: str, group: int) -> str:
    """The name of a value's part for one group."""
    return f"{name}[{group}]"


def whole(name: str) -> str:
    """The value that a name is, or is a part of."""
    found = _PART.fullmatch(name) or _ROUND.fullmatch(name)
    return found[1] if found else name


def of_round(name: str, number: int) -> str:
    """The name of what a round before the last makes of a value."""
    return f"{name}@{number}"


def round_of(name: str) -> int | None:
    """The round that a value is of; None for a value of the whole step."""
    found = _ROUND.fullmatch(name)
    return int(found[2]) if found else None


def group_of(name: str) -> int | None:
    """The group that a part is for; None for a whole value."""
    found = _PART.fullmatch(name)
    return int(found[2]) if found else None


def wholes(names: Iterable[str]) -> tuple[str, ...]:
    """The values that names are or are parts of, each once."""
    return tuple(dict.fromkeys(whole(name) for name in names))
