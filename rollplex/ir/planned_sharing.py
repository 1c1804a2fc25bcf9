"""What a plan says of the sharing of a GPU: a kind, and how prefix work runs as fewer and fewer responses decode.

responses that decode   or from   prefix work            by itself   beside it   hidden
at most 128             token 0   waits                     21.0 s      21.0 s        0
at most 24                 1480   6000 tokens, 80 SMs        8.0 s      11.3 s    6.1 s

How long responses are is a guess, that none has more tokens than its budget is not. So a row holds from whichever comes
first: so few responses decode, or so many tokens are decoded that a step at its budget has no more left than the row
and those behind it were to take.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollplex.ir.steps import Number, Seconds, Strict, Whole

PolicyKind = Literal["mps", "fixed", "solved", "none"]
DECODE_PARTS = 32
"""Decode is told in so many parts of equal tokens; a row begins with one of them."""


class PolicyRow(Strict):
    """A part of decode in the order of time: how prefix work runs beside it, and what that does to both."""

    live_at_most: Whole = Field(ge=1, description="responses of one engine that decode in it, at most")
    from_tokens: Whole = Field(
        description="or tokens of the youngest response since decode began, whatever decodes: the response budget less "
        "those from the row's beginning to decode's predicted end"
    )
    chunk_tokens: Whole = Field(description="tokens of one prefix forward; 0: prefix work waits")
    sms: Whole = Field(description="SMs that prefix work may use; all of the GPU's: as MPS schedules; 0: it waits")
    alone_s: Seconds = Field(description="predicted seconds of this part of decode with nothing beside it")
    decode_s: Seconds = Field(description="predicted seconds of it as planned")
    hidden_s: Seconds = Field(description="prefix work that is done meanwhile, seconds that it takes by itself")


class Policy(Strict):
    """How the co-running processes share the GPU."""

    kind: PolicyKind
    share: Number | None = Field(default=None, gt=0, lt=1)
    surface: str = Field(default="", description="digest of the calibration that the rows rest on")
    rows: tuple[PolicyRow, ...] = Field(default=(), description="where the job has a calibration with a surface")
    mps_s: Seconds | None = Field(
        default=None, description="predicted seconds of decode and prefixes under MPS default, beside `solved`"
    )
    why: str = ""

    @property
    def hidden_s(self) -> float:
        """Prefix work that is done while others decode, seconds that it takes by itself."""
        return sum(row.hidden_s for row in self.rows)
