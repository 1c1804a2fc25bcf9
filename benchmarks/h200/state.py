"""What has been measured so far, in a file that a later command goes on from: a part each, with what it took.

{"heading": "2 x NVIDIA H200, ..", "parts": {"0 serial": {"digest": "5e..", "seconds": 81.2, "found": ..}}}

A part is measured when it is there with the digest of what it is measured from: a plan that was compiled anew is not.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollplex.ir.errors import RunError

SLACK = 1.25
"""Of what a part of the same kind took before: how much longer the next may take."""


@dataclass(frozen=True)
class Done:
    """A part: its kind, the digest of its input, seconds, what went wrong or "", and what was measured."""

    kind: str
    digest: str
    seconds: float
    failed: str = ""
    found: Any = None


@dataclass
class State:
    """All parts; `heading` is what the first of them was measured with."""

    heading: str = ""
    parts: dict[str, Done] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> State:
        """The state in this file, or an empty one; RunError where the file holds something else."""
        if not path.exists():
            return cls()
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(data["heading"], {name: Done(**part) for name, part in data["parts"].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            hint = "delete it, or name another --runs"
            raise RunError(f"it does not hold what an earlier command measured: {err}", where=path, hint=hint) from None

    def write(self, path: Path) -> None:
        """The file is the old one or the new one, never a part."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def has(self, name: str, digest: str) -> bool:
        """Whether this part is measured, well or not."""
        return name in self.parts and self.parts[name].digest == digest

    def expected(self, kind: str, estimate_s: float) -> float:
        """Seconds that a part may take: by those of its kind before it, else the estimate."""
        seconds = [done.seconds for done in self.parts.values() if done.kind == kind and not done.failed]
        return SLACK * max(seconds) if seconds else estimate_s
