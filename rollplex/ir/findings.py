"""What a rule says about a job that is wrong: where, what, and what to try."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.ir.errors import Problem

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Finding:
    """Something wrong: the key to point at, and the other keys that the rule read."""

    path: KeyPath
    what: str
    hint: str = ""
    uses: tuple[KeyPath, ...] = ()

    def problem(self, where: str) -> Problem:
        """The finding as the user sees it."""
        return Problem(self.what, where, self.hint)
