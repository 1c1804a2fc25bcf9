"""Predicted seconds: which way each figure of a job moves them, and from where on."""

from __future__ import annotations

from dataclasses import replace

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
    """8192 tokens of budget, 4608 at the median: so much less time, down to a floor of launches."""
    assert prefix_s("workload.prompt_median=4608") == pytest.approx(prefix_s() * 4608 / 8192, rel=0.1)
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


def test_an_engine_prefills_its_prompts_before_it_decodes() -> None:
    """Once for a group: the FLOPs of each prompt through tower and model, over the ranks; half as many take half."""
    job = load_job(CLUSTER)
    costs, spec, tp, prompts = Costs(job), job.spec, job.rollout_tp, job.prompts_per_engine
    tokens, work = job.workload.prompt_tokens, role_work(job, "actor")
    vision = 2 * spec.vision_parameters * work.patches
    flops = prompts * (
        tokens * (2 * spec.active_parameters + 4 * spec.layers * spec.heads * spec.head_dim * tokens / 2) + vision
    )
    hidden = prompts * tokens * spec.hidden * 2
    sums = 2 * spec.layers * costs.all_reduce_s(hidden, tp)
    assert costs.prefill_s(tp, prompts) == pytest.approx(flops / tp / costs.flops_per_s + sums)
    assert costs.prefill_s(tp, prompts // 2) == pytest.approx(costs.prefill_s(tp, prompts) / 2, rel=0.01)
    parts = costs.decode_parts(spec.rank_parameters(tp, "language") * 2, tp, prompts)
    assert decode_s() == pytest.approx(costs.prefill_s(tp, prompts) + sum(s for s, _ in parts))


def test_weights_between_pools_take_as_long_as_a_public_engine_took() -> None:
    """32 B over 400 Gb/s links: 23.2 s were measured, 20 s are on the line through two other sizes."""
    far = load_job(CLUSTER, ["schedule=disaggregated", "cluster.rollout_gpus=16"])
    assert Costs(far).refresh_s() == pytest.approx(23.2, rel=0.2)
    faster = load_job(CLUSTER, ["schedule=disaggregated", "cluster.rollout_gpus=16", "cluster.internode_gb_s=500"])
    assert Costs(faster).refresh_s() < 8


def test_small_suffix_steps_take_their_launches_and_say_it_twice() -> None:
    """8 responses of 40 tokens in one step, or 8 that take 64 layers' launches each; a loss hears them all before."""
    job = load_job(CLUSTER, ["workload.response_tokens=40", "roles.actor.recompute=none"])
    costs, work = Costs(job), role_work(job, "actor")
    launches = work.spec.layers * EAGER_LAYER_S
    assert [costs.suffix_s(work, 3, step) for step in (8, 1)] == pytest.approx([3 * launches, 24 * launches])
    assert costs.suffix_s(work, 3) == costs.suffix_s(work, 3, 8)
    prefix = costs.train_s(work, 3, step=8) - 3 * costs.suffix_s(work, 3, 8)
    assert costs.train_s(work, 3, step=1) == pytest.approx(prefix + 4 * costs.suffix_s(work, 3, 1))
    later = replace(work, turn=2)
    assert costs.suffix_s(later, 3, 8) == pytest.approx(24 * launches)
