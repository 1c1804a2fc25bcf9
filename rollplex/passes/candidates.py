"""What a job left to the compiler: the parallel degrees that were chosen, and prefixes that run with their groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from rollplex.ir.plan import Candidate


@dataclass(frozen=True)
class Degrees:
    """The chosen value of every `auto` key, and the other legal choices, best first; empty for a job without `auto`."""

    made_by: ClassVar[str] = "degrees"
    chosen: dict[str, int] = field(default_factory=dict)
    others: tuple[Candidate, ...] = ()

    def __str__(self) -> str:
        values = "  ".join(f"{key}={value}" for key, value in self.chosen.items())
        return f"{values}   of {len(self.others) + 1} legal choices"


NO_CHOICE = Degrees()
"""Of a job that states all its degrees."""


@dataclass(frozen=True)
class Grouped:
    """Roles whose prefixes run with their groups because that is better than what else `prefix_saved: auto` may be."""

    made_by: ClassVar[str] = "with-group"
    roles: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        return f"prefix_saved: auto runs prefixes of {' and '.join(self.roles)} with their groups: {self.why}"
