"""What a plan says of trajectories: their turns, where each stays, and the times of every turn.

trajectories  3 turns, 11008 tokens; actor: actor.boundary, actor.boundary.2, actor.boundary.3; rollout.kv
"""

from __future__ import annotations

from pydantic import Field

from rollplex.ir.steps import Seconds, Strict, Whole


class TurnTimes(Strict):
    """Predicted seconds of one turn: decode, the prefixes of its history, and decode's slowdown beside them."""

    decode_s: Seconds
    prefix_s: Seconds
    interference_s: Seconds


class Trajectories(Strict):
    """A trajectory keeps its rollout engine and its training rank: what its later turns read lies there."""

    turns: Whole
    tokens: Whole = Field(description="of the longest trajectory: its prompt, all responses, all observations")
    kept: tuple[str, ...] = Field(description="objects of the rollout engine that a turn leaves to the next")
    pieces: dict[str, tuple[str, ...]] = Field(
        description="role -> the pieces of its boundary by turn; a turn's work reads its own and all before"
    )


def turned(name: str, turn: int) -> str:
    """A name of the first turn, as a later turn has it: `P1 decode.2`, `actor.boundary.2`."""
    return name if turn == 1 else f"{name}.{turn}"
