"""The public cases: what was observed, what the product must say, and which words and figures it must say it with.

Case(26, "26_heads_not_divided", "failed", "refused", says="does not divide the 28 attention heads")

A figure is read off the compiled plan and held to a number of the report, with the tolerance that is stated beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rollplex.ir.plan import Plan

Observed = Literal["failed", "worked"]
Verdict = Literal["refused", "infeasible", "warned", "fits"]


@dataclass(frozen=True)
class Figure:
    """A number of a report: how it is read off a plan, what it must be, and within which share of it."""

    what: str
    read: Callable[[Plan], float]
    value: float
    within: float


@dataclass(frozen=True)
class Case:
    """One job file: the row it retells, the outcome seen by whoever ran it, and the verdict we owe him."""

    row: int
    file: str
    observed: Observed
    verdict: Verdict
    says: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    algorithm: str = "grpo"
    ours_now: str = ""
    """Why what failed there is no failure here, where that is so: a bug of another system, not a limit of the GPU."""

    @property
    def false_fits(self) -> bool:
        """Whether the table itself asks for the worst answer."""
        return self.observed == "failed" and self.verdict == "fits" and not self.ours_now


CASES: tuple[Case, ...] = (
    Case(
        26, "26_heads_not_divided", "failed", "refused",
        says=("does not divide the 28 attention heads", "by heads alone 1, 2, 4, 7, 14, 28 would do"),
    ),
    Case(27, "27_prompts_over_ranks", "failed", "refused", says=("512 prompts do not divide over actor's 6",)),
    Case(27, "27_fewer_prompts_than_ranks", "failed", "refused", says=("32 prompts leave some of actor's 64",)),
    Case(28, "28_q_below_one", "failed", "refused", says=("q = 8 / 32 = 1/4", "q must be a positive integer")),
    Case(28, "28_q_two_to_four", "failed", "refused", says=("q = 2 / 4 = 1/2",)),
    Case(
        28, "28_q_four_to_two", "failed", "fits", figures=(Figure("q", lambda p: p.summary.layout.q, 2, 0),),
        ours_now="equal degrees were all that the transfer knew; q = 2 is legal here",
    ),
    Case(0, "works_megatron_32b_h20", "worked", "fits"),
)  # fmt: skip
