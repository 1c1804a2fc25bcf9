"""Cutting decode's tail: when it ends, how many still decode, and what a step holds of the others (paper section 4.7).

full        ================================|      32 groups, all awaited
oversample  ===================|                    40 groups, the first 32 taken, 8 discarded
partial     ==================|                     40 groups, the first 32 taken, 8 go on in the next step
"""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.ir.job import Job, load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run
from rollplex.passes.lengths import Decode, Lengths
from rollplex.passes.pipeline import compile_plan

GRPO = load_algorithm("examples/grpo.py")
CLUSTER = "examples/jobs/qwen2_5_vl_32b_h800x32.yaml"
MEDIAN = ("workload.response_median=400",)
PARTIAL = (*MEDIAN, "workload.rollout.kind=partial", "workload.rollout.share=0.8")
OVERSAMPLE = (*MEDIAN, "workload.rollout.kind=oversample", "workload.rollout.factor=1.25")


@cache
def compiled(*overrides: str) -> Plan:
    return compile_plan(GRPO, load_job(CLUSTER, overrides))


def decode(*overrides: str) -> Decode:
    return Decode.of(load_job(CLUSTER, overrides))


# ---- lengths and the end of decode


def test_half_of_the_responses_are_shorter_than_the_median_and_the_longest_fills_the_budget() -> None:
    lengths = decode(*MEDIAN).lengths
    assert lengths.done(400) == pytest.approx(0.5)
    assert lengths.done(2048) == 1.0
    assert 1 - lengths.done(2047) == pytest.approx(1 / 512, rel=0.02)  # 256 responses: one more than this is expected
    assert 400 < lengths.mean < 2048


def test_without_a_median_all_responses_fill_the_budget() -> None:
    lengths = decode().lengths
    assert (lengths.done(2047), lengths.done(2048), lengths.mean) == (0.0, 1.0, 2048.0)
    assert decode("workload.rollout.kind=partial", "workload.rollout.share=0.8").ends == 2048


def test_decode_ends_when_the_groups_of_a_step_are_complete() -> None:
    """Oversampling: 40 groups, each complete with its longest response: 40 F(T)^8 = 32."""
    full, some = decode(*MEDIAN), decode(*OVERSAMPLE)
    assert full.ends == 2048
    assert 40 * some.lengths.done(some.ends) ** 8 == pytest.approx(32)


def simulated(one: Decode, ends: float, steps: int, seed: int) -> float:
    """Groups in flight on average, when decode always ends after so many tokens: one group after the other, by lot."""
    draw = random.Random(seed)
    lengths = one.lengths
    total = 0
    for _ in range(steps):
        longest = max(
            min(draw.lognormvariate(math.log(lengths.median), lengths.spread), lengths.longest) for _ in range(8)
        )
        total += math.ceil(longest / ends)  # the steps that the group is in flight for
    return one.prompts * total / steps


def test_partial_rollout_is_steady() -> None:
    """As many groups leave a step as enter it: 32 fresh ones a step keep 40 in flight, by simulation too."""
    one = decode(*PARTIAL)
    assert simulated(one, one.ends, 20_000, seed=1) == pytest.approx(one.sampled, rel=0.02)
    assert one.snapshots == math.ceil(2048 / one.ends)


@given(kind=st.sampled_from(["partial", "oversample"]), more=st.integers(1, 32), median=st.integers(10, 1500))
def test_the_more_groups_are_sampled_the_sooner_decode_ends(kind: str, more: int, median: int) -> None:
    lengths = Lengths(median, 2048, math.log(2048 / median) / 2.9)
    ends = [Decode(lengths, kind, 32, 32 + 8 * n, 8, 8).ends for n in (more, more + 1)]
    assert 0 < ends[1] <= ends[0] <= 2048


@pytest.mark.parametrize("job", [MEDIAN, PARTIAL, OVERSAMPLE])
def test_live_responses_begin_with_all_and_fall(job: tuple[str, ...]) -> None:
    """At the beginning those of every sampled prompt that is not complete, then ever fewer."""
    one = decode(*job)
    live = [sum(n for n, _ in one.live(t)) for t in (0.0, one.ends / 2, one.ends * 0.99)]
    assert live == sorted(live, reverse=True)
    assert live[0] <= one.sampled * one.group / one.engines
    fresh = one.prompts if one.kind == "partial" else one.sampled
    assert live[0] >= fresh * one.group / one.engines


# ---- plans


@pytest.mark.parametrize("job", [PARTIAL, OVERSAMPLE])
def test_prefixes_are_for_all_and_the_rest_for_the_groups_that_a_step_takes(job: tuple[str, ...]) -> None:
    """Overlapped, nobody knows yet which prompts complete: 10 prefixes a rank, 8 trained on; serial: 8 and 8."""
    for schedule, prefixes in (("rollplex", 10), ("serial", 8)):
        plan = compiled(*job, f"schedule={schedule}")
        done = [s for s in plan.programs["train"] if isinstance(s, Run) and s.role == "actor"]
        assert [sum(s.task == task for s in done) for task in ("prefix", "train", "prefix_backward")] == [
            prefixes,
            8,
            8,
        ]
        assert plan.object("actor.boundary").slots == prefixes
        assert plan.summary.tail is not None
        assert (plan.summary.tail.sampled, plan.summary.tail.taken) == (40, 32)


def test_unfinished_responses_are_kept_at_the_host() -> None:
    """At worst the 5 groups of an engine all go on: 5 x 8 x 2048 tokens, each an id, a log-probability, a snapshot."""
    plan = compiled(*PARTIAL)
    kept = plan.object("rollout.carried")
    assert set(kept.residency.values()) == {"host"}
    assert kept.bytes == pytest.approx(5 * 8 * 2048 * 12, abs=2 * 2**20)
    assert [s.streams for s in plan.programs["rollout"] if isinstance(s, Run)] == [("rollout.carried",)]
    assert "rollout.carried" not in {o.name for o in compiled(*OVERSAMPLE).summary.objects}


def test_more_prompts_need_more_kv() -> None:
    def need(*job: str) -> int:
        return load_job(CLUSTER, job).rollout_kv_need_bytes

    assert need(*OVERSAMPLE) == need(*PARTIAL) == pytest.approx(1.25 * need(), rel=1e-3)


def test_a_shorter_window_saves_decode_and_costs_prefixes() -> None:
    """Decode is cut; prefixes are computed for prompts that are not used; serial has only those used."""
    full, serial = compiled(*MEDIAN).summary.times, compiled(*OVERSAMPLE, "schedule=serial").summary.times
    for job in (PARTIAL, OVERSAMPLE):
        t = compiled(*job).summary.times
        assert t.decode_s < 0.8 * full.decode_s
        assert t.prefix_s == pytest.approx(1.25 * full.prefix_s)
        assert t.step_s < full.step_s
    assert compiled(*OVERSAMPLE).summary.times.serial_s == pytest.approx(serial.serial_s, rel=0.02)


def test_what_it_does_to_the_update_is_told() -> None:
    partial, over = (" ".join(compiled(*job).summary.warnings) for job in (PARTIAL, OVERSAMPLE))
    assert "8 of 40 prompt groups go on in the next step" in partial
    assert "not strictly on-policy" in partial
    assert "8 of 40 prompt groups are discarded" in over
    assert "prefers prompts with short responses" in over
    assert "10 a rank, 8 of them used" in over
    blind = compile_plan(GRPO, load_job(CLUSTER, PARTIAL[1:]))
    assert "all responses are as long, and partial rollout shows no gain" in " ".join(blind.summary.warnings)


def test_a_rounded_count_of_prompts() -> None:
    """32 / 0.8 are 40 prompts, and 32 x 1.1 are 36."""
    job: Job = load_job(CLUSTER, PARTIAL)
    assert job.sampled == 40
    assert load_job("examples/jobs/qwen2_5_vl_32b_h800x8.yaml", ["workload.rollout={kind: oversample, factor: 1.1}",
        "roles.actor.rollout.kv_cache_gib=40"]).sampled == 36  # fmt: skip
