"""What a plan says of trajectories of several turns: how long they are, and what stays where they are.

3 turns, at most 11008 tokens; actor.boundary, actor.boundary.2, actor.boundary.3; rollout.kv
"""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.ir.module import Module
from rollplex.ir.planned_turns import Trajectories
from rollplex.passes.schedule import Schedule, turned
from rollplex.passes.state import Lifetimes

KEPT = ("rollout.kv",)
"""What the rollout engine leaves of a turn to the next."""


def trajectories(module: Module) -> Trajectories | None:
    """The turns of a step; None where a trajectory has one."""
    schedule, load = module[Schedule], module.job.workload
    if load.turns is None:
        return None
    roles = dict.fromkeys(c.role for c in schedule.calls if c.op == "prefix")
    return Trajectories(
        turns=load.turn_count,
        tokens=load.trajectory_tokens,
        kept=tuple(name for name in KEPT if name in module[Lifetimes]),
        pieces={r: tuple(turned(f"{r}.boundary", c.turn) for c in schedule.prefixes(r)) for r in roles},
    )


def turn_warnings(module: Module) -> Iterator[str]:
    """What the plan assumes of several turns."""
    turns = module.job.workload.turns
    if turns is not None and not turns.environment_s:
        yield "no workload.turns.environment_s: the environment is predicted to take no time"
