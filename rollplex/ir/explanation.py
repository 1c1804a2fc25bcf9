"""Why an object of a plan is where it is, as data: what `rollplex explain` prints."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.ir.formula import Formula
from rollplex.ir.plan import PlannedObject, Residency


@dataclass(frozen=True)
class Effect:
    """What an object's bytes do when one key of the job gets another value."""

    key: str
    old: str
    new: str
    nbytes: int


@dataclass(frozen=True)
class Stay:
    """One window: where the object is, and why there."""

    window: str
    place: Residency
    why: str


@dataclass(frozen=True)
class Move:
    """Another place in a window: what it would cost, or why it is not legal (then the figures are 0)."""

    window: str
    place: Residency
    refused: str = ""
    exposed_s: float = 0.0
    peak_bytes: int = 0
    moved_bytes: int = 0
    over_bytes: int = 0


@dataclass(frozen=True)
class Explanation:
    """Everything told of one object; `effects` are the job keys that size it, `moves` the places it is not in.

    `formula` comes to the object's bytes, but for whole pages; None where no formula in words does.
    """

    object: PlannedObject
    effects: tuple[Effect, ...]
    stays: tuple[Stay, ...]
    moves: tuple[Move, ...]
    note: str = ""
    formula: Formula | None = None
