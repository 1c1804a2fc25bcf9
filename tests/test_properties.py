"""Random algorithms, jobs and clusters: what compiles passes the checker, the same bytes twice, and never a traceback.

`ROLLPLEX_EXAMPLES=500` draws more of them; the draws repeat.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from algorithms import made
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.base import UNCHECKED

from rollplex.ir.checker import check_plan
from rollplex.ir.errors import RollplexError
from rollplex.ir.job import Job, load_job
from rollplex.ir.plan import Plan
from rollplex.passes.pipeline import compile_plan

EXAMPLES = Path(__file__).parent.parent / "examples"
NODE = EXAMPLES / "jobs/qwen2_5_vl_32b_h800x8.yaml"
random = settings(
    max_examples=int(os.environ.get("ROLLPLEX_EXAMPLES", "12")), derandomize=True, deadline=None,
    suppress_health_check=UNCHECKED,
)  # fmt: skip

# ---- algorithms

TOKENS = st.sampled_from(
    ["logp", "logp - rollout.logprobs", "ratio", "ratio.clamp(1 - clip, 1 + clip)", "torch.exp(logp)"]
)
GAINS = st.sampled_from(["gain", "score", "(score - score.mean())", "torch.tanh(gain)", "rx.group_normalize(score, n)"])
PENALTIES = st.sampled_from(
    ["0.1 * (ref_logp - logp)", "torch.exp(ref_logp - logp) - (ref_logp - logp) - 1", "logp * logp"]
)


@st.composite
def bodies(draw: st.DrawFn) -> str:
    """A loss from a small grammar: token terms times gains, penalties that may use a frozen role, a mean or a sum."""
    terms = [f"-({draw(TOKENS)}) * ({draw(GAINS)})" for _ in range(draw(st.integers(1, 3)))]
    terms += draw(st.lists(PENALTIES, max_size=2))
    reduced = draw(
        st.sampled_from(["rx.masked_mean({}, rollout.mask)", "rx.masked_sum({}, rollout.mask) / 64", "({}).mean()"])
    )
    after = draw(st.sampled_from(["loss", "2 * loss", "loss + 1", "-loss"]))
    lines = [
        "rollout = actor.generate(prompts, n=n)",
        "ref_logp = reference.logprobs(prompts, rollout)", "logp = actor.logprobs(prompts, rollout)",
        "score = rx.host(reward)(prompts, rollout)", "gain = score - score.mean(1, keepdim=True)",
        "ratio = torch.exp(logp - rollout.logprobs)", f"loss = {reduced.format(' + '.join(terms))}",
        f"actor.update({after})",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


# ---- jobs

KEYS: dict[str, tuple[object, ...]] = {
    "model": ("Qwen2.5-VL-7B", "Qwen2.5-VL-32B", "Qwen3-VL-8B", "Qwen3-VL-30B-A3B", "Llama-3.1-8B"),
    "cluster.gpu": ("H800", "H200", "H20", "A100-80"),
    "cluster.nodes": (1, 2, 4),
    "cluster.host_memory_gb": (200, 1400),
    "roles.actor.train.tensor_parallel": (2, 4, 8),
    "roles.actor.rollout.tensor_parallel": (1, 2, 4, 8),
    "roles.actor.rollout.kv_cache_gib": (8, 29, 40),
    "roles.actor.freeze": ("[]", "[vision]"),
    "roles.actor.prefix_saved": ("auto", "hbm", "host", "dropped", "group"),
    "workload.prompts": (8, 32, 64),
    "workload.prompt_tokens": (512, 4096, 8192),
    "workload.response_tokens": (128, 2048),
    "workload.frames": (0,),
    "schedule": ("serial", "rollplex", "naive"),
    "optimizer.chunks": ("auto", 16),
    "ablate": ("[]", "[weight_sharing]", "[state_offload]", "[rollout_release]", "[chunked_optimizer]"),
}


@st.composite
def overrides(draw: st.DrawFn) -> tuple[str, ...]:
    """A few keys with other values, most of them legal together."""
    keys = draw(st.lists(st.sampled_from(sorted(KEYS)), unique=True, max_size=6))
    return (
        *(f"{k}={draw(st.sampled_from(KEYS[k]))}" for k in keys),
        *(() if "workload.frames" in keys else ("workload.frames=0",)),
    )


def compiled(body: str, changes: tuple[str, ...]) -> Plan | None:
    """The plan of a body under the example job with changes; None where either is refused, as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            job: Job = load_job(NODE, changes)
            return compile_plan(made(Path(folder), body), job)
        except RollplexError as error:
            refused = error
    told = [p.what for p in refused.problems]
    assert all(told)
    assert not any("rule " in what for what in told), f"the checker refuses what the passes made:\n{refused}"
    return None


@random
@given(body=bodies(), changes=overrides())
def test_what_compiles_passes_the_checker_and_fits_its_windows(body: str, changes: tuple[str, ...]) -> None:
    """A feasible plan is over no capacity in any window; an infeasible one says where it is."""
    plan = compiled(body, changes)
    if plan is None:
        return
    assert check_plan(plan) == ()
    if plan.feasible:
        assert all(w.hbm_bytes <= plan.summary.capacity_bytes for w in plan.summary.windows)
        assert all(w.host_bytes <= plan.summary.host_capacity_bytes for w in plan.summary.windows)
    else:
        assert plan.infeasible is not None
        assert plan.infeasible.shortfall_bytes > 0


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    """A loop of some turns over a loss of the grammar, and the key that asks for as many."""
    count, seen = draw(st.integers(2, 4)), draw(st.sampled_from([64, 1024]))
    term = f"-({draw(TOKENS)}) * ({draw(st.sampled_from(['score', 'rx.group_normalize(score, n)']))})"
    penalty = draw(st.sampled_from(["", " + 0.1 * (ref_logp - logp)"]))
    body = f"""\
        history, rollout, found = prompts, actor.generate(prompts, n=n), []
        for turn in range({count}):
            found.append((rollout, reference.logprobs(history, rollout), actor.logprobs(history, rollout)))
            if turn + 1 < {count}:
                history = rx.observe(reward)(history, rollout)
                rollout = actor.generate(history, n=1)
        score, losses = rx.host(reward)(history, rollout), []
        for rollout, ref_logp, logp in found:
            ratio = torch.exp(logp - rollout.logprobs)
            losses.append({term}{penalty})
        actor.update(rx.trajectory_mean(losses, [rollout.mask for rollout, _, _ in found]))
    """
    return body, (f"workload.turns={{count: {count}, observation_tokens: {seen}}}", "workload.response_tokens=128")


@random
@given(turns=trajectories(), changes=overrides())
def test_trajectories_pass_the_checker(turns: tuple[str, tuple[str, ...]], changes: tuple[str, ...]) -> None:
    body, keys = turns
    set_twice = {k.partition("=")[0] for k in keys}
    plan = compiled(body, (*(c for c in changes if c.partition("=")[0] not in set_twice), *keys))
    if plan is not None:
        assert check_plan(plan) == ()
        assert plan.summary.trajectories is not None


@random
@given(body=bodies(), changes=overrides())
def test_two_compilations_give_the_same_bytes(body: str, changes: tuple[str, ...]) -> None:
    first, second = compiled(body, changes), compiled(body, changes)
    assert (first and first.to_json()) == (second and second.to_json())


@random
@given(changes=overrides(), more=st.sampled_from([1.01, 1.25, 2.0]))
def test_more_memory_never_makes_a_job_infeasible(changes: tuple[str, ...], more: float) -> None:
    """A GPU with more of the same: what fitted still fits."""
    body = (
        "rollout = actor.generate(prompts, n=n)\nlogp = actor.logprobs(prompts, rollout)\n"
        "ref_logp = reference.logprobs(prompts, rollout)\nscore = rx.host(reward)(prompts, rollout)\n"
        "actor.update(rx.masked_mean(-logp * score + ref_logp - logp, rollout.mask))\n"
    )
    plan = compiled(body, changes)
    if plan is not None and plan.feasible:
        larger = compiled(body, (*changes, f"cluster.capacity_gib={plan.summary.capacity_bytes * more / 2**30}"))
        assert larger is not None
        assert larger.feasible


def test_the_draws_are_mostly_legal() -> None:
    """The properties are of plans, not of refusals: three bodies in four compile under the job as it is."""
    found: list[bool] = []

    @settings(random, max_examples=16)
    @given(body=bodies())
    def draw(body: str) -> None:
        found.append(compiled(body, ("workload.frames=0",)) is not None)

    draw()
    if sum(found) < 0.75 * len(found):
        pytest.fail(f"{sum(found)} of {len(found)} compile")
