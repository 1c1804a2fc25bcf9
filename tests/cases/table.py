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


def gib(*names: str) -> Callable[[Plan], float]:
    """GiB of some objects together, on one GPU."""
    return lambda plan: sum(plan.object(name).bytes for name in names) / 2**30


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
        16, "16_asleep_tp1", "worked", "fits",
        figures=(Figure("MiB of an engine that sleeps", lambda p: 1024 * gib("rollout.context")(p), 774, 0.01),),
    ),
    Case(
        16, "16_asleep_tp2", "worked", "fits",
        figures=(Figure("MiB, with NCCL's least", lambda p: 1024 * gib("rollout.context")(p), 774 + 840, 0.01),),
    ),
    Case(20, "20_logits_of_one_trajectory", "failed", "infeasible", says=("training activations",)),
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
