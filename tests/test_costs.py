"""Predicted seconds: which way each figure of a job moves them, and from where on."""

from __future__ import annotations

import pytest

from rollplex.ir.job import load_job
from rollplex.ir.work import role_work
from rollplex.passes.costs import EAGER_LAYER_S, RING_HOP_S, Costs
from rollplex.passes.lengths import WIDEST, Lengths

CLUSTER = "examples/jobs/qwen2_5_vl_32b_h800x32.yaml"


def prefix_s(*overrides: str) -> float:
    job = load_job(CLUSTER, overrides)
    return Costs(job).prefix_s(role_work(job, "reference"), 1)


def decode_s(*overrides: str) -> float:
    job = load_job(CLUSTER, overrides)
    weights = job.spec.rank_parameters(job.rollout_tp, "language") * job.itemsize
    return Costs(job).decode_s(weights, job.rollout_tp, job.prompts_per_engine)


def test_times_follow_the_median_prompt_and_bytes_do_not() -> None:
    """8192 tokens of budget, 2048 at the median: a quarter of the time; less under a floor of launches."""
    assert prefix_s("workload.prompt_median=2048") == pytest.approx(prefix_s() / 4, rel=0.1)
    assert prefix_s("workload.prompt_median=2") == pytest.approx((64 + 32) * EAGER_LAYER_S)
    whole, median = (load_job(CLUSTER, o) for o in ((), ("workload.prompt_median=2048",)))
    assert whole.rollout_kv_need_bytes == median.rollout_kv_need_bytes


def test_a_wider_group_pays_in_hops() -> None:
    """TP 8 against TP 4: half the weights a GPU, 14 hops instead of 6; slower, as in paper section 4.5."""
    costs = Costs(load_job(CLUSTER))
    assert costs.all_reduce_s(0, 8) == pytest.approx(14 * RING_HOP_S)
    assert costs.all_reduce_s(1 << 20, 1) == 0
    wide, narrow = (decode_s(f"roles.actor.rollout.tensor_parallel={tp}") for tp in (8, 4))
    assert 1.05 < wide / narrow < 1.31


def test_short_answers_end_before_the_budget() -> None:
    """A median of 100 tokens: the longest of 256 responses has 5.6 times as many, not 2048."""
    lengths = Lengths.of(load_job(CLUSTER, ["workload.response_median=100"]))
    assert lengths.spread == WIDEST
    assert lengths.longest == 565
    assert decode_s("workload.response_median=100") < 0.3 * decode_s()
    assert Lengths.of(load_job(CLUSTER, ["workload.response_median=400"])).longest == 2048


def test_weights_between_pools_take_as_long_as_a_public_engine_took() -> None:
    """32 B over 400 Gb/s links: 23.2 s were measured, 20 s are on the line through two other sizes."""
    far = load_job(CLUSTER, ["schedule=disaggregated", "cluster.rollout_gpus=16"])
    assert Costs(far).refresh_s() == pytest.approx(23.2, rel=0.2)
    faster = load_job(CLUSTER, ["schedule=disaggregated", "cluster.rollout_gpus=16", "cluster.internode_gb_s=500"])
    assert Costs(faster).refresh_s() < 8
