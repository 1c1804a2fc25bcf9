"""Formulas in words: what is printed, evaluated by a parser of its own, comes to the plan's bytes, object by object."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollplex.ir.errors import RollplexError
from rollplex.ir.formula import Formula, largest, n, part, up
from rollplex.ir.job import Job, load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes.assemble import build_plan
from rollplex.passes.formulas import formula_of
from rollplex.passes.pipeline import default_pipeline, run_passes, start

X8, X32 = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", "examples/jobs/qwen2_5_vl_32b_h800x32.yaml"
MOE, PPO = "examples/jobs/gspo_30b_a3b_h800x16.yaml", "examples/jobs/ppo_32b_h800x32.yaml"
KV = ("roles.actor.rollout.kv_cache_gib=null", "roles.actor.rollout.gpu_memory_utilization=0.7")
POOLS = (
    "schedule=disaggregated",
    "cluster.rollout_gpus=8",
    "workload.prompts=48",
    "roles.actor.rollout.kv_cache_gib=68",
)
CUT = ("roles.actor.train.pipeline_parallel=2", "roles.actor.train.context_parallel=2")
UNFUSED = ("roles.actor.attention=unfused", "roles.reference.attention=unfused")
LONG = ("workload.response_tokens=40000", "workload.prompts=32", "roles.actor.rollout.kv_cache_gib=900")
SPREAD = ("roles.actor.train.tensor_parallel=4", "roles.actor.train.expert_parallel=2")
JOBS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("grpo", X8, ()),
    ("grpo", X8, ("schedule=naive", *UNFUSED)),
    ("grpo", X8, ("schedule=serial", "layout.order=reindex")),
    ("grpo", X8, ("ablate=[state_offload,weight_sharing]",)),
    ("grpo", X8, KV),
    ("grpo", X32, (*POOLS, "roles.actor.rollout.mm_encoder_tp_mode=weights")),
    ("grpo", X32, (*CUT, *UNFUSED, "roles.actor.recompute=none")),
    ("grpo", X32, ("roles.actor.train.distributed_optimizer=true", "roles.actor.freeze=[]")),
    ("grpo", X32, ("roles.actor.recompute=none", "roles.actor.prefix_saved=dropped")),
    ("grpo", X32, ("roles.actor.recompute=selective", *UNFUSED)),
    ("grpo", X8, ("schedule=serial", "roles.actor.prefix_saved=group")),
    ("gspo", MOE, (*SPREAD, "roles.actor.train.distributed_optimizer=true")),
    ("gspo", MOE, ("roles.actor.train.pipeline_parallel=2", "roles.actor.recompute=none")),
    ("ppo", PPO, ()),
    ("dapo", "examples/jobs/dapo_32b_h800x32.yaml", ()),
    ("dapo", "examples/jobs/dapo_32b_h800x32.yaml", ("cluster.gpu=A800-80", *LONG)),
    ("grpo_reward_model", "examples/jobs/reward_model_32b_h800x8.yaml", ()),
    ("grpo", "tests/cases/02_states_no_offload.yaml", ("roles.actor.recompute=none",)),
    ("grpo", "tests/cases/04_microbatch_too_large.yaml", ("roles.actor.train.zero=2",)),
    ("grpo", "tests/cases/20_logits_of_one_trajectory.yaml", ("roles.actor.train.engine=fsdp_fused",)),
    ("grpo", "tests/cases/20_logits_of_one_trajectory.yaml", ("roles.actor.train.context_parallel=8",)),
    ("grpo", "tests/cases/04_microbatch_too_large.yaml", ("roles.actor.train.microbatch=auto",)),
    ("ppo", "tests/cases/01_ppo_critic_a10.yaml", ()),
)


def planned(algorithm: str, path: str, overrides: tuple[str, ...]) -> tuple[Plan, Job]:
    """The plan, feasible or not, and its job with the heads that the algorithm asks for."""
    module = run_passes(
        start(load_algorithm(f"examples/{algorithm}.py"), load_job(path, overrides)), default_pipeline()
    )
    return build_plan(module), module.job


# ---- a reader of what is printed


class Reader:
    """sum := term ([+-] term)*, term := atom ([x/] atom)*, atom := number noun* | name | f(sum, ..) | (sum)."""

    def __init__(self, text: str, names: dict[str, Fraction]) -> None:
        self.tokens, self.names = re.findall(r"[(),]|[^\s(),]+", text), names

    def next(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def take(self) -> str:
        return self.tokens.pop(0)

    def sum(self) -> Fraction:
        value = self.term()
        while self.next() in ("+", "-"):
            value = value + self.term() if self.take() == "+" else value - self.term()
        return value

    def term(self) -> Fraction:
        value = self.atom()
        while self.next() in ("x", "/"):
            value = value * self.atom() if self.take() == "x" else value / self.atom()
        return value

    def atom(self) -> Fraction:
        if self.next() == "(":
            return self.several()[0]
        word, more = self.take(), list[str]()
        if word in ("max", "ceil", "floor"):
            values = self.several()
            return max(values) if word == "max" else Fraction((math.ceil if word == "ceil" else math.floor)(values[0]))
        while self.next() not in ("", "x", "/", "+", "-", "(", ")", ","):
            more.append(self.take())
        return Fraction(word) if word.isdigit() else self.names[" ".join([word, *more])]

    def several(self) -> list[Fraction]:
        assert self.take() == "("
        values = [self.sum()]
        while self.take() == ",":
            values.append(self.sum())
        return values


def read(formula: Formula) -> Fraction:
    """What its text says, with the texts of its parts."""
    names: dict[str, Fraction] = {}
    waiting = dict(formula.parts())
    while waiting:
        ready = [name for name, what in waiting.items() if not {p for p, _ in what.parts()} & waiting.keys()]
        names |= {name: Reader(str(waiting.pop(name)), names).sum() for name in ready}
    return Reader(str(formula), names).sum()


def held_to_the_plan(plan: Plan, job: Job) -> None:
    page = job.device.page_bytes
    for o in plan.summary.objects:
        formula = formula_of(plan, job, o.name)
        assert formula is not None, o.name
        value = read(formula)
        assert value.denominator == 1, str(formula)
        assert math.ceil(value / page) * page == o.bytes, (o.name, str(formula))


# ---- what is told is what is planned


@pytest.mark.parametrize(("algorithm", "path", "overrides"), JOBS)
def test_every_object_has_a_formula_that_comes_to_its_bytes(
    algorithm: str, path: str, overrides: tuple[str, ...]
) -> None:
    """Whatever the engine, the schedule and the degrees; but the host's workspaces, which its own file counts."""
    held_to_the_plan(*planned(algorithm, path, overrides))


@settings(max_examples=20, deadline=None)
@given(
    prompts=st.sampled_from([32, 64]),
    prompt_tokens=st.integers(64, 20_000),
    response_tokens=st.integers(64, 20_000),
    degrees=st.sampled_from([(8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 4, 1), (8, 1, 4)]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    attention=st.sampled_from(["flash", "unfused"]),
    sequence_parallel=st.booleans(),
    frozen=st.sampled_from(["[vision]", "[]"]),
)
def test_random_jobs(
    prompts: int, prompt_tokens: int, response_tokens: int, degrees: tuple[int, int, int], recompute: str,
    attention: str, sequence_parallel: bool, frozen: str,
) -> None:  # fmt: skip
    """Numbers that divide by nothing, every degree, with and without a trained tower."""
    tp, pp, cp = degrees
    train = {"tensor_parallel": tp, "pipeline_parallel": pp, "context_parallel": cp}
    overrides = [f"roles.actor.train.{key}={value}" for key, value in train.items()]
    overrides += [f"workload.prompts={prompts}", f"workload.prompt_tokens={prompt_tokens}", "workload.frames=0"]
    overrides += [f"workload.response_tokens={response_tokens}", f"roles.actor.recompute={recompute}"]
    overrides += [
        f"roles.actor.attention={attention}",
        f"roles.actor.freeze={frozen}",
        "roles.actor.rollout.kv_cache_gib=900",
    ]
    overrides += [f"roles.actor.train.sequence_parallel={str(sequence_parallel).lower()}"]
    overrides += [f"roles.actor.rollout.tensor_parallel={min(tp, 4)}"]
    try:
        found = planned("grpo", X32, tuple(overrides))
    except RollplexError:
        assume(False)
        raise
    held_to_the_plan(*found)


def test_no_formula_is_told_of_other_bytes() -> None:
    """A plan whose object has another size than the formula has no formula for it."""
    plan, job = planned("grpo", X8, ())
    page = job.device.page_bytes
    grown = [o.model_copy(update={"bytes": o.bytes + page}) for o in plan.summary.objects]
    other = plan.model_copy(update={"summary": plan.summary.model_copy(update={"objects": tuple(grown)})})
    assert not [o.name for o in grown if formula_of(other, job, o.name)]


def test_the_boundary_as_it_is_told() -> None:
    """By hand: 8 prompts a rank, all layers, keys and values of the one KV head of a rank."""
    plan, job = planned("grpo", X8, ())
    text = "32 prompts x 8192 tokens x 64 layers x 2 x 1 KV head x 128 x 2 B"
    assert str(formula_of(plan, job, "actor.boundary")) == text
    assert plan.object("actor.boundary").bytes == 32 * 8192 * 64 * 2 * 1 * 128 * 2


# ---- the structure itself


def test_a_formula_evaluates_and_prints() -> None:
    """Sums close themselves in products, ratios say how they round, parts stand by their names."""
    two = n(2, "halves") + n(3)
    each = part("each", two * n(7, "B"))
    f = largest(each // 2, up(n(9), 4)) * n(10) - n(1)
    assert (str(f), f.value) == ("max(floor(each / 2), ceil(9 / 4)) x 10 - 1", 169)
    assert [(name, str(what)) for name, what in f.parts()] == [("each", "(2 halves + 3) x 7 B")]
    assert read(f) == 169


def test_a_name_stands_for_one_thing() -> None:
    """Two parts of one name that differ are our own bug."""
    with pytest.raises(AssertionError, match="`it` stands for two things"):
        list((part("it", n(1) + n(2)) + part("it", n(1) + n(3))).parts())
