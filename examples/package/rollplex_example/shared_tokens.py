"""Count the prompt tokens that a step need not compute, because the responses of a group share their prefix.

actor        32 prefixes of up to 8192 tokens, each read 8 times:  1.84 M tokens a step are not computed again
reference    32 prefixes of up to 8192 tokens, each read 8 times:  1.84 M tokens a step are not computed again
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rollplex.ir.job import Job
from rollplex.ir.module import Module
from rollplex.passes.share_prefix import SharedPrefix, SharedPrefixes


@dataclass(frozen=True)
class Saving:
    """One role's prefixes, and the tokens of them that sharing saves in a step, over all GPUs."""

    role: str
    prefixes: int
    prompt_tokens: int
    readers: int

    @property
    def tokens(self) -> int:
        """Tokens of every read but the first, if each prompt fills its budget."""
        return self.prefixes * (self.readers - 1) * self.prompt_tokens

    def __str__(self) -> str:
        each = f"{self.prefixes} prefixes of up to {self.prompt_tokens} tokens, each read {self.readers} times"
        return f"{self.role:<12} {each}: {self.tokens / 1e6:5.2f} M tokens a step are not computed again"


@dataclass(frozen=True)
class Savings:
    """What sharing saves, role by role."""

    made_by: ClassVar[str] = "shared-tokens"
    roles: tuple[Saving, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.roles)) or "nothing is shared"


def saving(row: SharedPrefix, job: Job) -> Saving:
    """The saving of one boundary: what share-prefix found, in the job's tokens."""
    return Saving(row.role, row.prefixes, job.workload.prompt_tokens, row.readers)


@dataclass(frozen=True)
class SharedTokens:
    """Count the prompt tokens that a step does not compute again because responses share their prefix."""

    name: ClassVar[str] = "shared-tokens"
    after: ClassVar[str] = "share-prefix"
    needs: ClassVar[tuple[type, ...]] = (SharedPrefixes,)
    makes: ClassVar[type] = Savings

    def run(self, module: Module) -> Module:
        """Read the boundaries off SharedPrefixes; the graph stays as it is."""
        rows = sorted(module[SharedPrefixes].boundaries, key=lambda b: b.role)
        return module.put(Savings(tuple(saving(row, module.job) for row in rows)))
