"""What a plan says of the pinned host pool: one static offset for everything that is ever at the host."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollplex.ir.steps import Strict, Whole

LASTING = ("permanent", "regenerable")
"""Classes of state that outlives an iteration: it keeps its place for ever, also while a copy of it is in HBM."""


class HostPlace(Strict):
    """Where one object lies in the pinned pool of its GPU, whenever it is at the host."""

    object: str
    pool: str = Field(description="GPUs whose pinned pool it is, as in summary.pools")
    offset: Whole
    bytes: Whole
    windows: tuple[str, ...] = Field(description="windows in which it needs its place, moves included")


class HostPool(Strict):
    """Static offsets: no two objects overlap in time and address; `bound_bytes` is the least that is possible."""

    bytes: Whole = Field(description="one GPU's pool, of the GPUs that need most")
    bound_bytes: Whole
    status: Literal["optimal", "feasible"]
    offsets: tuple[HostPlace, ...]
