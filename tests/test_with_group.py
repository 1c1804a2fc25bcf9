"""A prefix that runs with its group: planned in the train window with room for one, and the bits of one that waits.

hbm      P2 prefix-actor [ prefix 0 | prefix 1 ]   P2 train-actor [ train 0 | back 0 | train 1 | back 1 ]
group                                P2 train-actor [ prefix 0 | train 0 | back 0 | prefix 1 | train 1 | back 1 ]
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from job_texts import edited, refusal
from megatron_tiny import megatron_plan
from runtime_threads import TRAIN, InThreads
from runtime_tiny import luck, tiny_plan
from torch import Tensor

from rollplex.ir.checker import check_plan
from rollplex.ir.errors import GraphError
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run, Step
from rollplex.passes.formulas import formula_of
from rollplex.passes.pipeline import compile_plan
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.report import measured_overlap
from rollplex.runtime.spans import Span

torch.set_num_threads(1)
X8, X32 = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", "examples/jobs/qwen2_5_vl_32b_h800x32.yaml"
GROUP, HBM = "roles.actor.prefix_saved=group", "roles.actor.prefix_saved=hbm"
FEW = ("workload.prompts=2", "optimizer.chunks=6")
POOLS = ("schedule=disaggregated", "cluster.rollout_gpus=16", "workload.prompts=8", "optimizer.chunks=6")
PAGE = 2 << 20
STEPS = 2


@cache
def compiled(*overrides: str, path: str = X8, algorithm: str = "grpo") -> Plan:
    return compile_plan(load_algorithm(f"examples/{algorithm}.py"), load_job(path, overrides))


def windows(plan: Plan) -> list[str]:
    return [w.name for w in plan.summary.windows]


def work(plan: Plan, role: str = "actor") -> list[tuple[str, int, str]]:
    """Task, group and window of a role's work, in order."""
    tasks = ("prefix", "train", "prefix_backward")
    runs = (s for s in plan.programs["train"] if isinstance(s, Run) and s.task in tasks and s.role == role)
    return [(s.task, s.microbatch, s.window) for s in runs]


def one_by_one(groups: int, window: str = "P2 train-actor") -> list[tuple[str, int, str]]:
    return [(task, m, window) for m in range(groups) for task in ("prefix", "train", "prefix_backward")]


# ---- the plan


def test_prefix_train_and_backward_of_a_group_stand_together_and_there_is_no_window_for_prefixes() -> None:
    plan = compiled("schedule=serial", GROUP, *FEW)
    names = ["P1 decode", "P2 prefix-reference", "P2 score-reference", "P2 train-actor", "P3 update", "P3 publish"]
    assert windows(plan) == names
    assert work(plan) == one_by_one(2)
    assert check_plan(plan) == ()


def test_under_rollplex_prefixes_of_other_roles_alone_run_beside_decode() -> None:
    plan, hbm = compiled(GROUP, *FEW), compiled(HBM, *FEW)
    names = ["P1 prefix-reference", "P1 decode", "P2 score-reference", "P2 train-actor", "P3 update", "P3 publish"]
    assert windows(plan) == names
    assert work(plan) == one_by_one(2)
    beside = {name: plan.object(name).residency["P1 decode"] for name in ("actor.boundary", "actor.prefix_saved")}
    assert set(beside.values()) == {"-"}
    assert plan.summary.times.prefix_s == pytest.approx(hbm.summary.times.prefix_s / 2, rel=1e-6)


def test_in_pools_of_their_own_too() -> None:
    plan = compiled(GROUP, *POOLS, path=X32)
    assert work(plan) == one_by_one(4)
    assert windows(plan)[:2] == ["P1 decode", "P2 prefix-reference"]
    assert plan.feasible


def test_where_nobody_else_has_prefixes_nothing_shares_the_gpu_with_decode() -> None:
    plan = compiled(
        "schedule=rollplex", GROUP, "workload.prompts=16", path="examples/jobs/gspo_30b_a3b_h800x16.yaml",
        algorithm="gspo",
    )  # fmt: skip
    assert windows(plan)[0] == "P1 decode"
    assert (plan.summary.policy.kind, plan.summary.policy.why) == ("none", "no prefix runs beside decode")
    assert plan.summary.times.prefix_s == plan.summary.times.interference_s == 0.0
    assert plan.summary.times.streamed_s is None


def test_of_two_trained_roles_each_runs_its_prefixes_where_it_trains() -> None:
    path = "examples/jobs/ppo_32b_h800x32.yaml"
    fewer = ("cluster.nodes=1", "workload.prompts=4", "optimizer.chunks=4", "schedule=serial")
    both = compiled(GROUP, "roles.critic.prefix_saved=group", *fewer, path=path, algorithm="ppo")
    one = compiled("roles.critic.prefix_saved=group", *fewer, path=path, algorithm="ppo")
    assert work(both, "critic") == work(one, "critic")
    assert {(task, window) for task, _, window in work(both, "critic")} == {
        (task, "P2 train-critic") for task in ("prefix", "train", "prefix_backward")
    }
    assert [w for w in windows(both) if "prefix" in w] == ["P2 prefix-reference"]
    assert [w for w in windows(one) if "prefix" in w] == ["P2 prefix-reference", "P2 prefix-actor"]


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_boundary_and_saved_state_have_the_bytes_of_one_prompt_in_the_train_window_alone(recompute: str) -> None:
    """32 B at TP 8: keys and values of a prompt are 8192 tokens x 64 layers x 2 x 1 KV head x 128 x 2 B = 256 MiB."""
    changes = ("schedule=serial", f"roles.actor.recompute={recompute}", *FEW)
    plan, every = compiled(*changes, GROUP), compiled(*changes, HBM)
    boundary, saved = (plan.object(f"actor.{n}") for n in ("boundary", "prefix_saved"))
    assert boundary.bytes == 8192 * 64 * 2 * 1 * 128 * 2
    assert (boundary.slots, saved.slots, every.object("actor.boundary").slots) == (1, 1, 2)
    tokens, layers = 8192, 64
    if recompute == "full":  # a layer's input under sequence parallelism, and of the last layer what makes its KV
        last = 2 * 5120 * 2 // 8 + 2 * 4 + (40 * 128 // 8 + 4 * 128) * 2 + 4 * 128
        assert 0 <= saved.bytes - tokens * (layers * 5120 * 2 // 8 + last) < PAGE
    assert 0 <= 2 * saved.bytes - every.object("actor.prefix_saved").bytes < 2 * PAGE
    if recompute == "full":  # else what is saved of the other prompts leaves room for more responses at a time
        assert plan.object("train.activations").bytes == every.object("train.activations").bytes
    for o in (boundary, saved):
        assert {w: place for w, place in o.residency.items() if place != "-"} == {"P2 train-actor": "hbm"}
    train = next(w for w in plan.summary.windows if w.name == "P2 train-actor")
    assert {o.name: o.bytes for o in (boundary, saved)}.items() <= train.by_object.items()


FEW_TOKENS = ("workload.prompt_tokens=2048", "workload.response_tokens=128", "roles.actor.recompute=full")


@pytest.mark.parametrize(("responses", "largest"), [(2, "actor.prefix_workspace"), (8, "train.activations")])
def test_temporaries_of_prefix_and_group_never_live_together_and_the_larger_are_counted(
    responses: int, largest: str
) -> None:
    """A frozen tower's 8192 patches outweigh a step of two short responses, eight of them outweigh the tower."""
    changes = ("schedule=serial", f"workload.group={responses}", *FEW_TOKENS, *FEW)
    plan, every = compiled(*changes, GROUP), compiled(*changes, HBM)
    sizes = {name: every.object(name).bytes for name in ("actor.prefix_workspace", "train.activations")}
    assert max(sizes, key=lambda name: sizes[name]) == largest
    assert plan.object("train.activations").bytes == sizes[largest]
    assert "actor.prefix_workspace" not in {o.name for o in plan.summary.objects}
    prefixes = [s for s in plan.programs["train"] if isinstance(s, Run) and s.task == "prefix" and s.role == "actor"]
    assert all("train.activations" in s.writes for s in prefixes)
    text = str(formula_of(plan, load_job(X8, (*changes, GROUP)), "train.activations"))
    assert text == "max(train step, prefix)"


def test_the_train_window_takes_the_seconds_of_the_prefixes() -> None:
    plan, every = compiled("schedule=serial", GROUP, *FEW), compiled("schedule=serial", HBM, *FEW)
    now, before = plan.summary.times, every.summary.times
    prefixes = next(w.seconds for w in every.summary.windows if w.name == "P2 prefix-actor")
    assert now.prefix_s == pytest.approx(before.prefix_s - prefixes, abs=1e-5)
    assert now.post_s == pytest.approx(before.post_s + prefixes, abs=1e-5)


def test_the_formulas_are_of_one_prompt() -> None:
    plan, job = compiled("schedule=serial", GROUP, *FEW), load_job(X8, ("schedule=serial", GROUP, *FEW))
    for name in ("actor.boundary", "actor.prefix_saved"):
        assert str(formula_of(plan, job, name)).startswith("1 prompt at a time x ")
    assert str(formula_of(plan, job, "train.activations")) == "max(train step, prefix)"


def test_unasked_a_prefix_waits_for_its_group() -> None:
    assert "P2 prefix-actor" in windows(compiled("schedule=serial", *FEW))


# ---- what does not go together

ACTOR, ROLLOUT = "    freeze: [vision]\n", "  frames: 16\n"
WITH_GROUP = (ACTOR, f"{ACTOR}    prefix_saved: group\n")
REFUSED = {
    "a frozen role": (
        [("reference:\n    score:", "reference:\n    prefix_saved: group\n    score:")],
        "is for what a backward needs, and `reference` is not trained\n    try: prefix_saved: auto",
    ),
    "whole sequences": (
        [WITH_GROUP, ("train:\n      engine: megatron\n      tensor_parallel: 8", "train:\n      engine: fsdp")],
        "moves a prefix, and engine fsdp runs every response with its prompt before it\n"
        "    try: prefix_saved: auto, or engine: megatron",
    ),
    "pipeline": (
        [
            WITH_GROUP,
            ("train:\n      engine: megatron\n      tensor_parallel: 8",
             "train:\n      engine: megatron\n      tensor_parallel: 4\n      pipeline_parallel: 2"),
        ],
        "has room for one group, and the 2 pipeline stages of `actor` work on several at a time\n"
        "    try: prefix_saved: auto, or pipeline_parallel: 1",
    ),
    "streamed": (
        [WITH_GROUP, ("schedule: rollplex", "schedule: streamed")],
        "runs prefixes behind decode, and schedule streamed trains on groups beside it\n"
        "    try: prefix_saved: auto, or schedule: serial",
    ),
    "naive": (
        [WITH_GROUP, ("schedule: rollplex", "schedule: naive")],
        "gives room back group by group, and schedule naive keeps everything",
    ),
    "turns": (
        [WITH_GROUP, (ROLLOUT, f"{ROLLOUT}  turns: {{count: 2, observation_tokens: 64}}\n")],
        "has room for the boundary of one turn, and the next turn goes on from it before any group is trained on\n"
        "    try: prefix_saved: auto, or no turns",
    ),
    "dynamic sampling": (
        [WITH_GROUP, (ROLLOUT, f"{ROLLOUT}  dynamic_sampling: {{rounds: 2, kept: 0.5}}\n")],
        "takes the groups of a rank in their order, and dynamic sampling may sample any of them again\n"
        "    try: prefix_saved: auto, or no dynamic_sampling",
    ),
    "oversampling": (
        [WITH_GROUP, (ROLLOUT, f"{ROLLOUT}  rollout: {{kind: oversample, factor: 1.5}}\n")],
        "takes every group of a rank, and oversample rollout the first to complete\n"
        "    try: prefix_saved: auto, or workload.rollout.kind: full",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_one_group_at_a_time_is_refused(case: str, tmp_path: Path) -> None:
    edits, message = REFUSED[case]
    text = edited(*edits)
    line = text[: text.index("prefix_saved: group")].count("\n") + 1
    assert f"job.yaml:{line}: prefix_saved group {message}" in str(refusal(tmp_path, text))


def test_a_call_that_is_not_split_is_refused(tmp_path: Path) -> None:
    """Its prompts depend on the response: there is no prefix to run with anything."""
    text, call = Path("examples/grpo.py").read_text(), "    logp = actor.logprobs(prompts, rollout)"
    assert text.count(call) == 1
    late = "    late = rx.host(reward, returns='sample_prompts')(prompts, rollout)\n"
    (tmp_path / "grpo.py").write_text(text.replace(call, late + call.replace("prompts", "late")))
    with pytest.raises(GraphError) as error:
        compile_plan(load_algorithm(str(tmp_path / "grpo.py")), load_job(X8, ("schedule=serial", GROUP, *FEW)))
    assert "roles.actor.prefix_saved is group, and %logp is not split into a prefix and a suffix" in str(error.value)
    assert "try: roles.actor.prefix_saved=auto" in str(error.value)


# ---- the run


def host_plan(saved: str, schedule: str = "serial", **changes: Any) -> Plan:
    rollout = {"engine": "host", "kv_cache_gib": "512 KiB", "runtime_gib": "256 KiB"}
    actor = {"train": {"engine": "host"}, "rollout": rollout, "prefix_saved": saved, **changes}
    return tiny_plan(
        model={"dtype": "float64"},
        cluster={"capacity_gib": "32 MiB"},
        optimizer={"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5},
        workload={"prompts": 3},
        roles={"actor": actor, "reference": {"score": {"engine": "host"}}},
        schedule=schedule,
    )


def on_megatron(saved: str, **changes: Any) -> Plan:
    plan = megatron_plan(1, workload={"prompts": 3}, schedule="serial")
    roles = {**plan.job["roles"], "actor": {**plan.job["roles"]["actor"], "prefix_saved": saved, **changes}}
    return megatron_plan(1, workload={"prompts": 3}, schedule="serial", roles=roles)


class Watched:
    """Two steps in threads, whose log of the arena is compared with the plan: gradients and digests of every step."""

    def __init__(self, plan: Plan) -> None:
        self.gradients: list[Tensor] = []
        self.at: set[int] = set()
        self.order: list[tuple[str, int]] = []
        self.run = InThreads(plan, {"reward": luck}, self._look)
        self.digests = []
        for step in range(STEPS):
            self.run.step(step)
            state = self.run.states[TRAIN].updates["actor"].digests()
            self.digests.append(self.run.train.digests() | self.run.rollout.digests() | state)
        self.run.close()

    def _look(self, process: ProcessId, step: Step) -> None:
        if process != TRAIN or not isinstance(step, Run) or step.role != "actor":
            return
        if step.task == "grad_norm":
            self.gradients.append(self.run.train._state("actor", "gradients").clone())
        else:
            self.order.append((step.task, step.microbatch))
        if step.task == "train":  # where the keys and values of its prefix lie
            work = self.run.train._work
            self.at.update(piece.prefix.kv.data_ptr() for piece in work._group(step).pieces["actor", 1])


CASES = {
    "host, everything saved": (host_plan, {"recompute": "none"}),
    "host, layers recomputed": (host_plan, {"recompute": "full"}),
    "host, frozen tower": (host_plan, {"recompute": "none", "freeze": ["vision"]}),
    "megatron, everything saved": (on_megatron, {"recompute": "none"}),
    "megatron, layers recomputed": (on_megatron, {"recompute": "full"}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_updates_are_to_the_bit_those_of_prefixes_that_wait(case: str) -> None:
    plan_of, changes = CASES[case]
    found, waits = (Watched(plan_of(saved, **changes)) for saved in ("group", "hbm"))
    assert found.order == [(task, m) for task, m, _ in one_by_one(3)] * STEPS
    assert len(found.gradients) == STEPS
    for ours, theirs in zip(found.gradients, waits.gradients, strict=True):
        assert ours.abs().max() > 1e-6
        assert torch.equal(ours, theirs)
    assert found.digests == waits.digests
    assert found.digests[0] != found.digests[1]
    assert (len(found.at), len(waits.at)) == (1, 3), "all groups have one room, those that wait one each"


def test_under_rollplex_the_bits_are_those_of_serial() -> None:
    assert Watched(host_plan("group", "rollplex")).digests == Watched(host_plan("group")).digests


def test_prefixes_with_their_group_are_work_on_responses() -> None:
    """Decode of 4 s with a prefix of the reference; behind it another, the actor's own and its training."""

    def span(task: Any, role: str, start: float, stop: float, window: str = "w") -> Span:
        process = TRAIN if task != "generate" else ProcessId("rollout", 0)
        step = Run(window=window, task=task, node="n", role=role)
        return Span(process, 0, step, int(start * 1e9), int(stop * 1e9))

    prefixes = [span("prefix", "reference", 1, 2), span("prefix", "reference", 5, 6)]
    own = [span("prefix", "actor", 6, 7, "P2 train-actor"), span("train", "actor", 7, 9, "P2 train-actor")]
    found = measured_overlap(iter([span("generate", "actor", 0, 4), *prefixes, *own]))
    assert (found.prefix_s, found.hidden_s, found.post_s) == (2.0, 1.0, 3.0)
