"""A snapshot that is released, as pages tell it: in which windows what comes or goes in parts, and in how many.

in_parts(plan)    {("actor.snapshot", "P3 update"), ("actor.gradients", "P3 update")}
told(plan)        "snapshot released and back in 6 parts"
"""

from __future__ import annotations

from rollplex.ir.plan import Plan
from rollplex.ir.steps import MapPart, UnmapPart


def in_parts(plan: Plan) -> frozenset[tuple[str, str]]:
    """Objects and the windows in which they come or go part by part."""
    steps = (step for program in plan.programs.values() for step in program)
    return frozenset((s.object, s.window) for s in steps if isinstance(s, MapPart | UnmapPart))


def told(plan: Plan) -> str:
    """The release in words; nothing where the snapshot stays."""
    n = sum(isinstance(step, MapPart) for program in plan.programs.values() for step in program)
    return f"snapshot released and back in {n} part{'' if n == 1 else 's'}" if n else ""
