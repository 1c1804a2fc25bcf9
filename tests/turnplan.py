"""A small compiled plan of three turns, for the checker: 8 GPUs, 4 prompts, two trajectories each.

train        prefix reference, actor | prefix.2 .. | prefix.3 .. || suffix 1, 2, 3 | train 1, 2, 3, backward 3, 2, 1 ..
rollout      generate 1              | generate 2  | generate 3
controller   load                  observe       observe       || reward
"""

from __future__ import annotations

from functools import cache

from algorithms import EXAMPLES

from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes.pipeline import compile_plan

JOB = EXAMPLES / "jobs" / "embodied_7b_h800x8.yaml"
SMALL = (
    "workload.prompts=4",
    "workload.group=2",
    "workload.prompt_tokens=1024",
    "workload.response_tokens=64",
    "workload.response_median=32",
    "workload.frames=1",
    "workload.max_pixels=50176",
    "workload.turns.observation_tokens=128",
    "optimizer.chunks=4",
    "optimizer.in_flight=1",
)


@cache
def three_turns(*overrides: str) -> Plan:
    """The embodied example on few prompts."""
    return compile_plan(load_algorithm(EXAMPLES / "embodied.py"), load_job(JOB, (*SMALL, *overrides)))
