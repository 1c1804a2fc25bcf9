"""A small compiled plan with two trained roles, for the checker: 8 GPUs, 4 prompts, actor and critic at other TP.

train    prefix reference, critic, actor || suffix reference | critic 0, 1 -> values | actor 0 .. 3 || update both
"""

from __future__ import annotations

from functools import cache

from algorithms import EXAMPLES

from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes.pipeline import compile_plan

JOB = EXAMPLES / "jobs" / "ppo_32b_h800x32.yaml"
SMALL = (
    "cluster.nodes=1",
    "workload.prompts=4",
    "workload.group=2",
    "workload.prompt_tokens=1024",
    "workload.response_tokens=128",
    "workload.response_median=64",
    "workload.frames=1",
    "workload.max_pixels=50176",
    "optimizer.chunks=4",
    "optimizer.in_flight=1",
)


@cache
def two_roles(*overrides: str) -> Plan:
    """PPO on few prompts."""
    return compile_plan(load_algorithm(EXAMPLES / "ppo.py"), load_job(JOB, (*SMALL, *overrides)))
