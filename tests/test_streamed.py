"""Schedule `streamed`: what its plans run, wait for and take, against arithmetic of their own, and what is refused.

train      prefixes | wait rollout[0]  score 0  wait score[0]  train 0 | .. | wait rollout[3] || score 3  train 3  norm
rollout    generate 0  signal rollout[0]  generate 1  signal rollout[1]  ..                   ||
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import golden
import pytest
from algorithms import EXAMPLES, START, made, typed
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.ir.errors import GraphError, JobError
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.loss import couples_step, split_loss
from rollplex.ir.parts import group_of, part, whole, wholes
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Barrier, Run, Signal, Step, Wait
from rollplex.passes.costs import INTERFERENCE_SHARE
from rollplex.passes.lengths import Lengths
from rollplex.passes.pipeline import compile_plan
from rollplex.passes.rebuild import rebuild
from rollplex.passes.schedule import Schedule, check_streamed
from rollplex.passes.state import Lifetimes
from rollplex.passes.stream_times import stream_times
from rollplex.show.page import plan_page

JOB = EXAMPLES / "jobs/qwen2_5_vl_32b_h800x8.yaml"
GROUPS = 4
SMALL = (f"workload.prompts={GROUPS}", "workload.response_median=512", "roles.actor.rollout.kv_cache_gib=16")


@cache
def plan(schedule: str = "streamed", *overrides: str) -> Plan:
    return compile_plan(
        load_algorithm(EXAMPLES / "grpo.py"), load_job(JOB, (f"schedule={schedule}", *SMALL, *overrides))
    )


def place(steps: tuple[Step, ...], found: Step) -> int:
    return next(i for i, s in enumerate(steps) if s == found)


# ---- programs


def test_names_of_parts() -> None:
    assert part("rollout", 3) == "rollout[3]"
    assert (whole("rollout[3]"), group_of("rollout[3]")) == ("rollout", 3)
    assert (whole("rollout"), group_of("rollout")) == ("rollout", None)
    assert wholes(("prompts", "rollout[0]", "rollout[1]")) == ("prompts", "rollout")


def test_a_group_is_trained_on_behind_its_event_and_the_last_behind_the_barrier() -> None:
    steps = plan().programs["train"]
    barrier = next(i for i, s in enumerate(steps) if isinstance(s, Barrier))
    waits = {s.event: i for i, s in enumerate(steps) if isinstance(s, Wait)}
    work = [(i, s) for i, s in enumerate(steps) if isinstance(s, Run) and s.task in ("suffix", "train")]
    assert [(s.task, s.microbatch) for _, s in work] == [(t, m) for m in range(GROUPS) for t in ("suffix", "train")]
    for i, step in work:
        assert (i < barrier) == (step.microbatch < GROUPS - 1)
        assert waits[f"rollout[{step.microbatch}]"] < i
        if step.task == "train":
            assert waits[f"score[{step.microbatch}]"] < i
        assert f"rollout[{step.microbatch}]" in step.inputs
    (norm,) = (s for s in steps if isinstance(s, Run) and s.task == "grad_norm")
    assert norm.inputs == tuple(f"rollout[{m}]" for m in range(GROUPS))


def test_the_engine_hands_over_group_after_group_and_the_host_judges_each() -> None:
    programs = plan().programs
    rollout = [s for s in programs["rollout"] if isinstance(s, Run | Signal) and s.kind != "barrier"]
    for m in range(GROUPS):
        run, signal = rollout[2 * m : 2 * m + 2]
        assert isinstance(run, Run)
        assert isinstance(signal, Signal)
        assert (run.task, run.microbatch, run.outputs, signal.event) == (
            "generate",
            m,
            (f"rollout[{m}]",),
            f"rollout[{m}]",
        )
    hosts = [s for s in programs["controller"] if isinstance(s, Run) and s.task == "host"]
    assert [(s.microbatch, s.outputs) for s in hosts] == [(m, (f"score[{m}]",)) for m in range(GROUPS)]


def test_gradients_and_activations_live_beside_decode() -> None:
    """What the other schedules make behind rollout-complete is there in the stream's window, with the KV cache."""
    found, other = plan(), plan("rollplex")
    for name in ("actor.gradients", "train.activations", "reference.score_workspace", "rollout.kv"):
        assert found.object(name).residency["P1 stream"] == "hbm"
    assert other.object("actor.gradients").produced == "P2 train-actor"
    assert "live beside decode in P1 stream (actor FP32 gradients" in "\n".join(found.summary.warnings)


def test_what_does_not_fit_beside_decode_is_infeasible_there() -> None:
    job = load_job(JOB, ("schedule=streamed", "workload.prompts=8"))
    found = compile_plan(load_algorithm(EXAMPLES / "grpo.py"), job)
    assert found.infeasible is not None
    assert found.infeasible.window == "P1 stream"
    assert "actor.gradients" in {o.name for o in found.infeasible.objects}
    assert any(r.change == "schedule=rollplex" and r.verified for r in found.infeasible.remedies)


# ---- times


def simulated(ready: list[float], prefix: float, group: float, share: float, slower: float) -> tuple[float, float]:
    """In steps of a millisecond: when the groups but the last are done, and when decode ends."""
    tick, stretch = 1e-3, 1 + slower / ready[-1]
    now, left, m = prefix / share, group, 0
    while m < len(ready) - 1:
        if now >= ready[m] * stretch - 1e-9:
            left -= tick * (share if now < ready[-1] * stretch else 1.0)
        now += tick
        if left <= 1e-9:
            m, left = m + 1, group
    return now, ready[-1] * stretch


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.2, 4.0), min_size=2, max_size=5).map(sorted),
    st.floats(0.0, 3.0), st.floats(0.01, 1.0), st.sampled_from([1.0, 0.5]),
)  # fmt: skip
def test_stream_times_are_those_of_a_simulation(ready: list[float], prefix: float, group: float, share: float) -> None:
    found = stream_times(ready, prefix, group, share)
    ends, decode = simulated(ready, prefix, group, share, found.interference_s)
    last = max(ends, decode)
    serial = max(decode, prefix / share) + (len(ready) - 1) * group
    near = pytest.approx
    assert found.window_s == near(last - prefix / share, abs=0.02)
    assert found.hidden_s == near(max(serial - last, 0.0), abs=0.02)
    assert 0 <= found.interference_s <= INTERFERENCE_SHARE * ready[-1] + 1e-9


def test_nothing_is_hidden_where_all_groups_end_together() -> None:
    assert stream_times((5.0, 5.0, 5.0), 1.0, 1.0).hidden_s == 0.0
    same = compile_plan(load_algorithm(EXAMPLES / "grpo.py"), load_job(JOB, ("schedule=streamed", SMALL[0])))
    assert same.summary.times.hidden_post_s == 0.0


def test_a_streamed_step_is_shorter_by_what_it_hides_and_rollplex_says_so() -> None:
    streamed, other = plan().summary.times, plan("rollplex").summary.times
    assert 0 < streamed.hidden_post_s < streamed.post_s
    assert streamed.step_s < other.step_s
    assert other.streamed_s is not None
    # The two differ by transfers alone, which residency hides elsewhere.
    moved = streamed.exposed_transfer_s - other.exposed_transfer_s
    assert streamed.step_s == pytest.approx(other.streamed_s + moved, abs=1e-3)
    assert streamed.streamed_s is None


def test_the_longest_of_many_responses() -> None:
    """The quantile 1 - 1/2k of a log-normal: the median of 1 of k ~ 0.5, the step's longest where k is the step."""
    job = load_job(JOB, SMALL)
    lengths = Lengths.of(job)
    assert lengths.longest_of(GROUPS * 8) == pytest.approx(lengths.longest, rel=1e-3)
    assert lengths.done(lengths.longest_of(8)) == pytest.approx(1 - 1 / 16)
    found = [lengths.longest_of(k) for k in range(8, 8 * GROUPS + 1, 8)]
    assert found == sorted(found)


# ---- losses


@pytest.mark.parametrize(
    ("name", "divisor"),
    [("grpo", "rollout_mask.count"), ("dapo", "and_1.count"), ("gspo", "prompts.count"), ("rloo", "prompts.count")],
)
def test_losses_whose_normaliser_is_left_to_the_end(name: str, divisor: str) -> None:
    graph = typed(load_algorithm(EXAMPLES / f"{name}.py"), {"n": 8}).graph
    assert split_loss(graph).divisor == divisor
    assert couples_step(graph, "actor") is None


FORMS = {
    "rx.masked_mean(logp * score, rollout.mask) + 2 * rx.masked_mean(-logp, rollout.mask)": "rollout_mask.count",
    "-(logp.mean() * 3 - (logp * score).mean())": "prompts.count",
    "(logp * score).sum() / rollout.mask.sum()": "sum_2",
    "1 - logp.mean()": "prompts.count",
    "rx.masked_sum(logp, rollout.mask) * 0.01": "",
}


@pytest.mark.parametrize("loss", FORMS)
def test_forms_of_one_divisor(tmp_path: Path, loss: str) -> None:
    graph = typed(made(tmp_path, START + f"actor.update({loss})\n")).graph
    assert split_loss(graph).divisor == FORMS[loss]
    assert couples_step(graph, "actor") is None


COUPLED = {
    "rx.masked_mean(logp * (score - score.mean()), rollout.mask)": r"%mean = Tensor.mean mixes the prompts",
    "rx.masked_mean(logp, rollout.mask) + logp.mean()": r"is not all of the loss that the batch's size divides",
    "rx.masked_mean(logp, rollout.mask) + rx.masked_sum(logp, rollout.mask)": r"is not all of the loss",
    "rx.masked_mean(rx.masked_mean(logp.detach(), rollout.mask) * logp, rollout.mask)": "couples prompt groups",
    "rx.masked_mean(logp, rollout.mask) / rollout.mask.sum()": "mixes the prompts|not all of the loss",
}


@pytest.mark.parametrize("loss", COUPLED)
def test_losses_that_need_all_groups_first_are_refused(tmp_path: Path, loss: str) -> None:
    graph = typed(made(tmp_path, START + f"actor.update({loss})\n")).graph
    with pytest.raises(GraphError, match=COUPLED[loss]):
        check_streamed(graph, ("actor",))


def test_reinforce_pp_is_refused_by_the_op_that_whitens() -> None:
    job = load_job(EXAMPLES / "jobs/critic_free_7b_h800x8.yaml", ("schedule=streamed",))
    with pytest.raises(GraphError) as error:
        compile_plan(load_algorithm(EXAMPLES / "reinforce_pp.py"), job)
    message = str(error.value)
    assert message.startswith(
        "reinforce_pp.py:22: schedule streamed trains on a group while others decode, and %masked"
    )
    assert "try: schedule=rollplex" in message


# ---- jobs


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("workload.prompts=1",), "a rank has one prompt group, and none could be trained on while others decode"),
        (("workload.rollout={kind: partial, share: 0.5}",), "partial rollout takes the first to complete"),
        (("workload.dynamic_sampling={rounds: 2, kept: 0.7}",), "dynamic sampling may sample any of them again"),
        (("workload.turns={count: 2, observation_tokens: 64}",), "the turns of all trajectories end together"),
        (
            ("roles.reference.score.tensor_parallel=4",),
            "`reference` has 2 data-parallel ranks and `actor` 1, so a group of one is not a group of the other",
        ),
    ],
)
def test_jobs_that_cannot_stream(overrides: tuple[str, ...], what: str) -> None:
    with pytest.raises(JobError) as error:
        load_job(JOB, ("schedule=streamed", *SMALL, *overrides))
    assert what in str(error.value)
    assert "schedule: rollplex" in str(error.value)


def test_the_facts_behind_a_plan_file_are_made_again() -> None:
    """As `rollplex explain` does it, from the graph of the plan, which has no types."""
    found = rebuild(plan())
    assert found[Schedule].stream is not None
    assert "P1 stream" in found[Lifetimes]["actor.gradients"].uses


def test_page() -> None:
    """The page as `--plan-only` prints it: the contract with the stream's window, and what is hidden."""
    page = "\n".join(text.plain for text in plan_page(plan(), JOB.name))
    golden.check("plan_streamed.txt", page + "\n")
