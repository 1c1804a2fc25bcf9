"""What a plan says of rounds of sampling: how many at most, and what keeps a group.

rounds  at most 3; a group is kept where %and_1 keeps a token
"""

from __future__ import annotations

from pydantic import Field

from rollplex.ir.steps import Name, Strict, Whole


class Rounds(Strict):
    """Dynamic sampling: every round but the first samples other prompts in place of those that taught nothing.

    Programs have all rounds, each with values of its own (`rollout@1`, see parts.py); one that nothing is left for
    samples nothing.
    """

    most: Whole = Field(description="rounds of a step, the first and the last included")
    keeps: Name = Field(description="the loss's mask: a group of which it keeps no token is sampled again")
