"""Rollouts of several turns: what a plan holds, runs and takes, against arithmetic of its own, and what is refused.

P1 prefix 1 | decode 1 | (environment) | prefix 2 | decode 2 | (environment) | prefix 3 | decode 3 || P2 .. || P3 ..
"""

from __future__ import annotations

from pathlib import Path

import pytest
from algorithms import EXAMPLES, made
from turnplan import JOB, three_turns

from rollplex.ir.checker import check_plan
from rollplex.ir.errors import GraphError, JobError
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run, Signal, Wait
from rollplex.passes.pipeline import compile_plan

EMBODIED = EXAMPLES / "embodied.py"
PAGE = 2 << 20
PROMPTS, GROUP, PROMPT, RESPONSE, SEEN, TURNS = 32, 8, 4096, 256, 1024, 3
# Qwen2.5-VL-7B: 28 layers, 28 heads and 4 KV heads of 128, 18,944 wide; BF16
LAYERS, HEADS, KV_HEADS, HEAD, HIDDEN = 28, 28, 4, 128, 3584


def plan(*overrides: str) -> Plan:
    return compile_plan(load_algorithm(EMBODIED), load_job(JOB, overrides))


def runs(plan: Plan, process: str, task: str) -> list[Run]:
    return [s for s in plan.programs[process] if isinstance(s, Run) and s.task == task]


# ---- bytes


def test_a_piece_of_every_turn_in_closed_form() -> None:
    """Of a prompt once a group; of a response and an observation for every trajectory; TP 4, 16 prompts a rank."""
    token = 2 * LAYERS * (KV_HEADS // 4) * HEAD * 2
    found, prompts = plan(), PROMPTS // 2
    for role in ("actor", "reference"):
        assert 0 <= found.object(f"{role}.boundary").bytes - prompts * PROMPT * token < PAGE
        for turn in (2, 3):
            nbytes = prompts * GROUP * (RESPONSE + SEEN) * token
            assert 0 <= found.object(f"{role}.boundary.{turn}").bytes - nbytes < PAGE
    # recompute: full, sequence parallel: what a checkpointed layer keeps is its input, a quarter of it on each rank
    inputs = LAYERS * HIDDEN * 2 // 4
    # the last layer is not checkpointed: its norm, what its projection reads, cosines and sines; FP32 angles for all
    last = 2 * HIDDEN * 2 // 4 + (HEADS // 4 * HEAD + 4 * HEAD) * 2 + 8 + 4 * HEAD
    for turn, tokens in ((2, GROUP * (RESPONSE + SEEN)), (3, GROUP * (RESPONSE + SEEN))):
        nbytes = prompts * tokens * (inputs + last)
        assert 0 <= found.object(f"actor.prefix_saved.{turn}").bytes - nbytes < PAGE


def test_an_engine_holds_whole_trajectories() -> None:
    """Blocks of 16 tokens before the last prompt token once, then of every trajectory all turns; 2 KV heads a rank."""
    job = load_job(JOB)
    shared = (PROMPT - 1) // 16
    whole = PROMPT + TURNS * RESPONSE + (TURNS - 1) * SEEN
    own = -(-(whole - 16 * shared) // 16)
    blocks = (PROMPTS // 4) * (shared + GROUP * own) + 1
    assert job.rollout_kv_need_bytes == blocks * 16 * 2 * LAYERS * (KV_HEADS // 2) * HEAD * 2
    assert job.workload.trajectory_tokens == whole == 6912
    assert plan().summary.trajectories.tokens == whole  # type: ignore[union-attr]


def test_one_turn_after_another_costs_less_memory_than_one_long_response() -> None:
    """The same tokens: observations are prefix, not response, and the suffix workspaces are of one turn."""
    long = plan("workload.response_tokens=256")
    more = plan("workload.response_tokens=512", "roles.actor.rollout.kv_cache_gib=12")
    assert long.object("train.activations").bytes < more.object("train.activations").bytes


def test_a_batch_holds_every_turn() -> None:
    """Ids and a mask of prompts and observations, and log-probabilities of responses; pixels of 8 frames and 1."""
    patches = 4 * min(PROMPT, 4 * (401408 // 784))
    seen = 4 * min(SEEN, 401408 // 784)
    pixels = 3 * 2 * 14 * 14 * 2
    prompt = PROMPT * 9 + patches * pixels
    trajectory = TURNS * RESPONSE * 13 + (TURNS - 1) * (SEEN * 9 + seen * pixels)
    assert plan().summary.batch_bytes == PROMPTS * (prompt + GROUP * trajectory)


# ---- programs


def test_a_turn_waits_for_its_observation_and_goes_on_from_all_before() -> None:
    found = three_turns()
    generates = runs(found, "rollout", "generate")
    assert [s.node for s in generates] == ["rollout", "rollout_1", "rollout_2"]
    assert [s.inputs for s in generates] == [("prompts",), ("history",), ("history_1",)]
    assert ["rollout.kv" in s.reads for s in generates] == [False, True, True]
    read = {s.node: {n for n in s.reads if ".boundary" in n} for s in runs(found, "train", "train")}
    assert read["logp"] == {"actor.boundary"}
    assert read["logp_2"] == {"actor.boundary", "actor.boundary.2", "actor.boundary.3"}
    events = [s.event for s in found.programs["controller"] if isinstance(s, Signal | Wait)]
    assert events[:6] == ["prompts", "rollout", "history", "rollout_1", "history_1", "rollout_2"]


def test_backward_runs_from_the_last_piece_to_the_first() -> None:
    steps = [(s.microbatch, s.task, s.node) for s in three_turns().programs["train"] if isinstance(s, Run)]
    group = [(task, node) for m, task, node in steps if m == 1 and task in ("train", "prefix_backward")]
    assert group == [
        ("train", "logp"), ("train", "logp_1"), ("train", "logp_2"),
        ("prefix_backward", "kv_act_2"), ("prefix_backward", "kv_act_1"), ("prefix_backward", "kv_act"),
    ]  # fmt: skip


# ---- times


def test_each_turn_hides_its_own_prefixes() -> None:
    """step = sum over turns of max(decode + slowdown, prefix) + 2 x 1.5 s + post + exposed; the bound turn by turn."""
    t = plan().summary.times
    assert t.environment_s == 2 * 1.5
    lasts = [max(u.decode_s + u.interference_s, u.prefix_s) for u in t.turns]
    assert t.step_s == pytest.approx(sum(lasts) + 3.0 + t.post_s + t.exposed_transfer_s, abs=1e-4)
    assert t.serial_s == pytest.approx(t.decode_s + t.prefix_s + 3.0 + t.post_s + t.exposed_transfer_s, abs=1e-4)
    bound = sum(max(0.0, min(u.prefix_s - u.interference_s, u.decode_s)) for u in t.turns)
    assert t.saving_bound_s == pytest.approx(bound, abs=1e-4)
    decode = [u.decode_s for u in t.turns]
    assert decode == sorted(decode)  # a longer history is read at every token
    assert decode[0] < decode[2]


@pytest.mark.parametrize("schedule", ["serial", "disaggregated", "naive"])
def test_other_schedules(schedule: str) -> None:
    more = ("cluster.rollout_gpus=4",) if schedule == "disaggregated" else ()
    found = three_turns(f"schedule={schedule}", *more)
    assert check_plan(found) == ()
    names = [w.name for w in found.summary.windows]
    if schedule != "naive":
        assert names[:3] == ["P1 decode", "P1 decode.2", "P1 decode.3"]
        assert "P2 prefix-actor.3" in names


# ---- what is refused


def wrong(*overrides: str, algorithm: Path = EMBODIED) -> str:
    with pytest.raises((GraphError, JobError)) as error:
        compile_plan(load_algorithm(algorithm), load_job(JOB, overrides))
    return str(error.value)


def test_job_and_algorithm_agree_on_turns() -> None:
    assert wrong(algorithm=EXAMPLES / "grpo.py") == (
        "grpo.py:14: the algorithm samples one turn, the job has workload.turns.count=3\n    try: workload.turns=null"
    )
    assert wrong("algorithm.turns=2") == (
        "embodied.py:23: the algorithm samples 2 turns, the job has workload.turns.count=3\n"
        "    try: workload.turns.count=2"
    )
    assert wrong("workload.turns=null") == (
        "embodied.py:23: the algorithm samples 3 turns, the job has no workload.turns\n"
        "    try: workload: {turns: {count: .., observation_tokens: ..}} in the job"
    )


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("workload.rollout={kind: partial, share: 0.8}",), "partial rollout ends decode before every response has"),
        (("workload.dynamic_sampling.rounds=2",), "dynamic sampling judges a group by its scores"),
        (("workload.turns.frames=9",), "9 frames of 401408 pixels take 2560 of 1024 tokens"),
        (("model=Llama-3.1-8B", "workload.frames=0"), "Llama-3.1-8B has no vision tower"),
        (("roles.actor.rollout.max_model_len=6911",), "max_model_len 6911 is less than 4096 + 3 x 256 + 2 x 1024"),
        (("roles.actor.rollout.kv_cache_gib=2",), "8 prompts x (4096 + 8 x 2816) tokens on one engine take"),
        (("roles.actor.train.engine=fsdp", "schedule=serial"), "engine fsdp runs whole sequences"),
        (("workload.turns.count=1",), "`count` is 1; must be at least 2"),
    ],
)
def test_jobs_that_have_no_turns(overrides: tuple[str, ...], what: str) -> None:
    assert what in wrong(*overrides)


START = """\
rollout = actor.generate(prompts, n=n)
history = rx.observe(reward)(prompts, rollout)
"""
NEXT = "second = actor.generate(history, n=1)\n"
END = "score = rx.host(reward)(history, second)\nactor.update(rx.masked_mean(logp * score, second.mask))\n"
TWO = ("workload.turns.count=2",)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (
            START + NEXT + "x = reference.logprobs(prompts, rollout)\nlogp = actor.logprobs(prompts, second)\n" + END,
            "made.py:10: `logp` reads `second` behind `prompts`, which it was not sampled from",
        ),
        (
            START + NEXT + NEXT.replace("second", "third") + "x = reference.logprobs(history, third)\n"
            "logp = actor.logprobs(history, second)\n" + END,
            "made.py:9: a turn has exactly one `generate`, turn 2 has another",
        ),
        (
            START + NEXT + "x = reference.logprobs(history, rollout)\nlogp = actor.logprobs(history, second)\n" + END,
            "made.py:9: `x` is not split, and turns go on from a boundary",
        ),
        (
            START + NEXT + "x = reference.logprobs(history, second)\nlogp = actor.logprobs(history, second)\n"
            "y = reference.logprobs(history, second)\n" + END,
            "made.py:11: `reference` has a second `suffix` call in turn 2",
        ),
    ],
)
def test_calls_that_no_turn_has(body: str, what: str, tmp_path: Path) -> None:
    """Lines of the body begin at 6 of made.py."""
    algorithm = made(tmp_path, body)
    with pytest.raises(GraphError) as error:
        compile_plan(algorithm, load_job(JOB, TWO))
    assert str(error.value).startswith(what)


def test_a_role_may_score_one_turn_of_several(tmp_path: Path) -> None:
    """The reference reads the last turn alone: its boundary still has both pieces."""
    body = START + NEXT + "x = reference.logprobs(history, second)\nlogp = actor.logprobs(history, second)\n"
    body += "first = actor.logprobs(prompts, rollout)\nscore = rx.host(reward)(history, second)\n"
    body += "loss = rx.trajectory_mean([first * score, (logp - x) * score], [rollout.mask, second.mask])\n"
    found = compile_plan(made(tmp_path, body + "actor.update(loss)\n"), load_job(JOB, TWO))
    assert check_plan(found) == ()
    assert {s.node for s in runs(found, "train", "suffix")} == {"x"}
    told = found.summary.trajectories
    assert told is not None
    assert told.pieces["reference"] == ("reference.boundary", "reference.boundary.2")


def test_adapters_and_several_turns_go_together() -> None:
    assert check_plan(three_turns("roles.actor.lora.rank=16", "optimizer.chunks=auto")) == ()
