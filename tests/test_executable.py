"""What no backend executes: each reason that a plan may give is given by some job, and missed by the checker.

job -> plan.not_executable: r1, r2, r3      check(plan) accepts      check(plan without r2) names r2
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from algorithms import EXAMPLES, made
from megatron_tiny import megatron, megatron_plan
from mutants.plans import FSDP
from runtime_tiny import tiny_job, tiny_plan
from test_calls import FEW, RETOLD, SIGNATURE
from turnplan import three_turns
from twoplan import two_roles
from vllm_tiny import HOST, VL, vllm_plan

from rollplex.ir.checker import check_plan
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes import executable
from rollplex.passes.pipeline import compile_plan

NODE, CLUSTER = "qwen2_5_vl_32b_h800x8", "qwen2_5_vl_32b_h800x32"
SMALL = {"engine": "host", "kv_cache_gib": "1 MiB", "runtime_gib": "512 KiB"}
TRAIN = "roles.actor.train."
CUT = (
    *(TRAIN + f"{degree}_parallel=2" for degree in ("tensor", "pipeline", "context", "expert")),
    *("cluster.nodes=2", TRAIN + "distributed_optimizer=true", "roles.actor.rollout.tensor_parallel=2"),
    *("workload.prompts=8", "optimizer.chunks=6", "roles.actor.recompute=selective", "roles.actor.attention=unfused"),
)
POOLS = ("schedule=disaggregated", "cluster.rollout_gpus=16", "workload.prompts=8", "optimizer.chunks=6")
REPEATED = ("model=Qwen2.5-VL-3B", TRAIN + "tensor_parallel=8", "roles.reference.score.tensor_parallel=2")
EARLY = """
rollout = actor.generate(prompts, n=n)
ref_logp = reference.logprobs(prompts, rollout)
logp = actor.logprobs(prompts, rollout)
weight = rx.host(reward)(prompts)
actor.update(rx.masked_mean((logp - ref_logp) * weight, rollout.mask))
"""
DIVIDED = """
rollout = actor.generate(prompts, n=n)
ref_logp = reference.logprobs(prompts, rollout)
logp = actor.logprobs(prompts, rollout)
score, weight = rx.host(reward)(prompts, rollout), rx.host(other)(prompts)
actor.update(rx.masked_sum((logp - ref_logp) * score, rollout.mask) / weight.sum())
"""


@cache
def folder() -> Path:
    return Path(mkdtemp(prefix="rollplex-executable-"))


def example(algorithm: str, job: str, *overrides: str) -> Plan:
    """An algorithm of examples/ under a job of examples/jobs, or of a job's text."""
    file = EXAMPLES / f"jobs/{job}.yaml"
    if "\n" in job:
        file = folder() / "job.yaml"
        file.write_text(job)
    return compile_plan(load_algorithm(EXAMPLES / f"{algorithm}.py"), load_job(file, overrides))


def early() -> Plan:
    """A reward that is known before the rollout, and a step that takes some of what it samples."""
    job = tiny_job(workload={"rollout": {"kind": "partial", "share": 0.5}}, cluster={"capacity_gib": "64 MiB"})
    return compile_plan(made(folder(), EARLY, "prompts, *, actor, reference, reward, n=2"), job)


def divided() -> Plan:
    """A step that takes some of what it samples, and divides by numbers of all prompts."""
    job = tiny_job(workload={"rollout": {"kind": "oversample", "factor": 2}}, cluster={"capacity_gib": "64 MiB"})
    return compile_plan(made(folder(), DIVIDED, "prompts, *, actor, reference, reward, other, n=2"), job)


def halves() -> Plan:
    """The host engine's trainer at TP 2, which it does not have."""
    roles = {"actor": {"train": HOST | {"tensor_parallel": 2}, "rollout": SMALL}, "reference": {"score": HOST}}
    return tiny_plan(cluster={"gpus_per_node": 2}, roles=roles)


def shared_out() -> Plan:
    """Three prompts of a step over two rollout engines of a TP 2 trainer."""
    return tiny_plan(
        cluster={"gpus_per_node": 2, "capacity_gib": "64 MiB"},
        roles={"actor": {"train": megatron(2), "rollout": SMALL}, "reference": {"score": megatron(2)}},
        workload={"prompts": 3, "rollout": {"kind": "oversample", "factor": 2}},
    )


PLANS: dict[str, Callable[[], Plan]] = {
    "another engine": lambda: example("grpo", FSDP),
    "a cut model": lambda: example("gspo", "gspo_30b_a3b_h800x16", *CUT),
    "repeated heads": lambda: example("grpo", NODE, *REPEATED, *FEW),
    "two pools": lambda: example("grpo", CLUSTER, *POOLS),
    "adapters": lambda: example("grpo", NODE, "roles.actor.lora={rank: 64}", *FEW),
    "a cut tower": lambda: example("grpo", NODE, "roles.actor.rollout.mm_encoder_tp_mode=weights", *FEW),
    "a critic": two_roles,
    "turns": three_turns,
    "whole calls": lambda: compile_plan(
        made(folder(), RETOLD, SIGNATURE), load_job(EXAMPLES / f"jobs/{NODE}.yaml", FEW)
    ),
    "no host function behind the rollout": early,
    "numbers of prompts that nobody takes": divided,
    "prompts that engines cannot share": shared_out,
    "host ranks that cut": halves,
    "a second copy, vllm": lambda: vllm_plan(ablate=["weight_sharing"]),
    "a second copy, megatron": lambda: megatron_plan(1, ablate=["weight_sharing"]),
    "double precision": lambda: vllm_plan(model={"dtype": "float64"}),
    "small heads": lambda: vllm_plan(model={"config": {**VL, "num_attention_heads": 8}}),
    "pieces of prompts": lambda: vllm_plan(rollout={"max_num_batched_tokens": 100}),
    "naive": lambda: example("grpo", NODE, "schedule=naive", *FEW),
}


@cache
def plan(name: str) -> Plan:
    return PLANS[name]()


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_leaves_out_a_reason_is_refused(name: str) -> None:
    """Each of them, also where another one says much the same; and one that is there without a ground."""
    found = plan(name)
    assert check_plan(found) == ()
    assert found.not_executable
    for i, reason in enumerate(found.not_executable):
        fewer = found.model_copy(update={"not_executable": (*found.not_executable[:i], *found.not_executable[i + 1 :])})
        (missed,) = check_plan(fewer)
        assert missed.what == f"no backend executes it, and not_executable leaves out why: {reason.partition(':')[0]}"
        twice = found.model_copy(update={"not_executable": (*found.not_executable, reason)})
        assert [v.kind for v in check_plan(twice)] == ["asked"]


def templates() -> Iterator[str]:
    """A pattern of every reason in the pass: what it yields, anything in the place of a value."""
    for node in ast.walk(ast.parse(Path(executable.__file__).read_text())):
        match node:
            case ast.Yield(value=ast.Constant(value=str(text))):
                yield re.escape(text)
            case ast.Yield(value=ast.JoinedStr(values=parts)):
                yield "".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else "(.+)" for p in parts)


def test_every_reason_has_a_job_that_gives_it() -> None:
    """What the pass can say is said by some plan of the table, and so missed where it is left out."""
    told = [reason for name in PLANS for reason in plan(name).not_executable]
    wanted = list(templates())
    assert len(wanted) == 28
    assert [t for t in wanted if not any(re.fullmatch(t, reason) for reason in told)] == []
    assert {f"actor {what}_parallel 2" for what in ("pipeline", "context", "expert")} <= set(told)


def test_a_reason_without_a_ground_is_refused() -> None:
    found = example("grpo", NODE, *FEW)
    assert found.not_executable == ()
    (wrong,) = check_plan(found.model_copy(update={"not_executable": ("engine vllm: it is late",)}))
    assert wrong.what == "not_executable has `engine vllm`, for which plan and job have no ground"
