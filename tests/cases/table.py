"""The public cases: what was observed, what the product must say, and which words and figures it must say it with.

Case(26, "26_heads_not_divided", "failed", "refused", says="does not divide the 28 attention heads")

A figure is read off the compiled plan and held to a number of the report, with the tolerance that is stated beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rollplex.ir.plan import Plan
from rollplex.ir.planned_job import job_of

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


def gib(*names: str) -> Callable[[Plan], float]:
    """GiB of some objects together, on one GPU."""
    return lambda plan: sum(plan.object(name).bytes for name in names) / 2**30


def kv_of(tokens: int) -> Callable[[Plan], float]:
    """GiB that a sequence of so many tokens takes of a GPU's KV cache."""

    def read(plan: Plan) -> float:
        job = job_of(plan)
        return tokens * job.spec.kv_bytes_per_token(job.rollout_tp, job.itemsize) / 2**30

    return read


def batch_gib(plan: Plan) -> float:
    """GiB of one step's prompts and responses."""
    return plan.summary.batch_bytes / 2**30


def node_gb(plan: Plan) -> float:
    """GB of a node's host memory that are taken, less the controller's."""
    node = plan.summary.node
    return (node.total_bytes - node.process_bytes / 17 - plan.summary.batch_bytes) / 10**9


def states(*roles: str, tower: str = "") -> Callable[[Plan], float]:
    """GiB of weights, gradients and moments of some roles, and of a tower's weights."""
    names = [f"{role}.{part}" for role in roles for part in ("snapshot", "gradients", "moments")]
    return gib(*names, *([tower] if tower else []))


CASES: tuple[Case, ...] = (
    Case(
        1, "01_ppo_critic_a10", "failed", "infeasible", algorithm="ppo",
        figures=(Figure("16 bytes a parameter of two models over 4 GPUs", states("actor", "critic"), 23.94, 0.01),),
    ),
    Case(
        2, "02_states_no_offload", "failed", "infeasible", says=("actor FP32 Adam moments 13.99",),
        figures=(Figure("16 bytes a parameter over 2 GPUs", states("actor", tower="actor.vision"), 27.97, 0.01),),
    ),
    Case(
        4, "04_microbatch_too_large", "failed", "warned",
        says=("are left in P2 train-actor: fragmentation of the trainer's allocator is not counted",),
    ),
    Case(
        8, "08_default_microbatch", "failed", "warned", algorithm="dapo",
        says=("are left in P1 decode: fragmentation of the trainer's allocator is not counted",),
    ),
    Case(9, "09_vlm_r1_32b_h800x64", "worked", "fits"),
    Case(
        10, "10_qwq_32b_h20x8", "failed", "infeasible", says=("rollout BF16 weights", "in P1 decode"),
        figures=(
            Figure("16 bytes a parameter over 8 GPUs", states("actor"), 61.0, 0.01),
            Figure("a whole copy on every GPU", gib("rollout.weights"), 61.0, 0.01),
        ),
    ),
    Case(10, "10_contradictory_knobs", "failed", "refused", says=("engine fsdp has no tensor_parallel",)),
    Case(
        12, "12_72b_tp4_a100_40", "failed", "refused",
        says=("0.95 of 39.4 GiB is 37.4 GiB: weights 35.2 GiB", "less than nothing", "a larger tensor_parallel"),
    ),
    Case(
        14, "14_staged_wake", "failed", "fits",
        ours_now="weights are written before the KV cache is mapped; a plan of the other order is refused",
    ),
    Case(
        16, "16_asleep_tp1", "worked", "fits",
        figures=(Figure("MiB of an engine that sleeps", lambda p: 1024 * gib("rollout.context")(p), 774, 0.01),),
    ),
    Case(
        16, "16_asleep_tp2", "worked", "fits",
        figures=(Figure("MiB, vLLM's groups", lambda p: 1024 * gib("rollout.context")(p), 774 + 840 + 485 + 24, 0.01),),
    ),
    Case(
        18, "18_235b_whole_context", "failed", "refused", algorithm="dapo",
        says=("0.9 of 79.3 GiB is 71.4 GiB: weights 56.0 GiB", "one sequence of 262144 tokens takes 11.8 GiB"),
    ),
    Case(
        18, "18_235b_41960", "worked", "fits", algorithm="dapo",
        figures=(
            Figure("GiB of weights a GPU", gib("rollout.weights"), 54.87, 0.001),
            Figure("GiB of KV of 41960 tokens", kv_of(41960), 1.88, 0.01),
            Figure("GiB of KV of the whole context", kv_of(262144), 11.75, 0.001),
        ),
    ),
    Case(20, "20_logits_of_one_trajectory", "failed", "infeasible", says=("training activations",)),
    Case(
        23, "23_65536_samples", "failed", "fits", algorithm="dapo",
        figures=(Figure("GiB of a step's batch", batch_gib, 128 * (1024 * 9 + 512 * 8192 * 13) / 2**30, 0),),
        ours_now="a GPU holds a microbatch of the samples; all of them are counted against a node's host memory",
    ),
    Case(
        23, "23_8192_samples", "worked", "fits", algorithm="dapo",
        figures=(Figure("GiB of a step's batch", batch_gib, 512 * (1024 * 9 + 16 * 8192 * 13) / 2**30, 0),),
    ),
    Case(
        24, "24_host_96gb", "failed", "infeasible",
        says=("the host memory of a node is 89.4 GiB", "cluster.host_memory_gb=108"),
        figures=(Figure("GB a process of each GPU", lambda p: node_gb(p) / 8, 11.2, 0.15),),
    ),
    Case(24, "24_host_1tb", "worked", "fits"),
    Case(
        24, "24_eight_engines_asleep", "failed", "fits",
        figures=(Figure("GiB a node of 8 that sleep", lambda p: 8 * gib("rollout.weights")(p), 113.5, 0.001),),
        ours_now="killed as 24 processes a node load their models, before any step; a plan begins behind that",
    ),
    Case(
        26, "26_heads_not_divided", "failed", "refused",
        says=("does not divide the 28 attention heads", "by heads alone 1, 2, 4, 7, 14, 28 would do"),
    ),
    Case(
        26, "26_sequence_parallel_16", "failed", "refused",
        says=("context_parallel 16 cannot deal out the 40 attention and 8 KV heads", "1 or 2 or 4 or 8 or 40"),
    ),
    Case(27, "27_prompts_over_ranks", "failed", "refused", says=("512 prompts do not divide over actor's 6",)),
    Case(27, "27_fewer_prompts_than_ranks", "failed", "refused", says=("32 prompts leave some of actor's 64",)),
    Case(28, "28_q_below_one", "failed", "refused", says=("q = 8 / 32 = 1/4", "q must be a positive integer")),
    Case(28, "28_q_two_to_four", "failed", "refused", says=("q = 2 / 4 = 1/2",)),
    Case(
        28, "28_q_four_to_two", "failed", "fits", figures=(Figure("q", lambda p: p.summary.layout.q, 2, 0),),
        ours_now="equal degrees were all that the transfer knew; q = 2 is legal here",
    ),
    Case(
        30, "30_longer_than_the_model_length", "failed", "refused",
        says=("max_model_len 1024 is less than 1024 + 1024 tokens",),
    ),
    Case(0, "works_megatron_32b_h20", "worked", "fits"),
    Case(0, "works_fsdp_7b_h800x2", "worked", "fits"),
    Case(0, "works_fsdp_72b_h20x32", "worked", "fits"),
    Case(0, "works_fsdp_72b_h800x32", "worked", "fits"),
)  # fmt: skip
