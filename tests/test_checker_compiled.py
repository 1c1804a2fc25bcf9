"""Compiled plans pass the checker, and every fault of mutants/ in them is refused by the rule that it breaks."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import MUTANTS
from turnplan import three_turns
from twoplan import two_roles

from rollplex.ir.checker import check_plan
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes.pipeline import compile_plan

ALGORITHMS = {name: load_algorithm(f"examples/{name}.py") for name in ("grpo", "grpo_reward_model", "dapo")}
NODE, CLUSTER = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", "examples/jobs/qwen2_5_vl_32b_h800x32.yaml"
SEVEN = "examples/jobs/critic_free_7b_h800x8.yaml"
FEW = ("workload.prompts=4",)
SHORT = ("workload.prompt_tokens=2048", "workload.response_tokens=128")
STREAMED = ("schedule=streamed", "workload.response_median=512", "roles.actor.rollout.kv_cache_gib=16")
LORA, MERGED = "roles.actor.lora={rank: 64}", "roles.actor.lora={rank: 64, served: merged}"
TP4 = ("roles.actor.train.tensor_parallel=4", "roles.reference.score.tensor_parallel=4")
JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rollplex": (NODE, FEW),
    "serial": (NODE, ("schedule=serial", *FEW)),
    "naive": (NODE, ("schedule=naive", *FEW)),
    "streamed": (NODE, (*STREAMED, *FEW)),
    "streamed, data parallel": (CLUSTER, (*STREAMED, "workload.prompts=16")),
    "four nodes": (CLUSTER, ()),
    "two chunks": (SEVEN, ("cluster.capacity_gib=46", "optimizer.chunks=2", *FEW)),
    "gradients in pieces": (NODE, ("optimizer.chunks=3", "roles.actor.freeze=[]", *FEW)),
    "gradients in pieces, four nodes": (CLUSTER, ("optimizer.chunks=4",)),
    "snapshot released": (NODE, ("optimizer.snapshot=release", "optimizer.chunks=6", *FEW)),
    "snapshot released, four nodes": (CLUSTER, ("optimizer.snapshot=release",)),
    "snapshot released, trained tower": (NODE, ("optimizer.snapshot=release", "roles.actor.freeze=[]", *FEW)),
    "snapshot released, nothing shared": (NODE, ("optimizer.snapshot=release", "ablate=[weight_sharing]", *FEW)),
    "snapshot released, serial, re-indexed": (
        NODE,
        ("optimizer.snapshot=release", "schedule=serial", "layout.order=reindex", *FEW),
    ),
    "saved state at the host": (NODE, ("roles.actor.prefix_saved=host", *FEW)),
    "saved state in HBM": (NODE, ("roles.actor.prefix_saved=hbm", *FEW)),
    "with group": (NODE, ("roles.actor.prefix_saved=group", *FEW)),
    "with group, serial, everything saved": (
        NODE,
        ("roles.actor.prefix_saved=group", "roles.actor.recompute=none", "schedule=serial", *FEW),
    ),
    "with group, two pools": (
        CLUSTER,
        ("schedule=disaggregated", "cluster.rollout_gpus=16", "roles.actor.prefix_saved=group"),
    ),
    "with group, a frozen tower and short responses": (
        NODE,
        ("roles.actor.prefix_saved=group", "workload.group=2", *SHORT, *FEW),
    ),
    "with group, no state offload": (NODE, ("ablate=[state_offload]", "roles.actor.prefix_saved=group", *FEW)),
    "with group, lora": (NODE, (LORA, "roles.actor.prefix_saved=group", *FEW)),
    "with group, trained tower": (
        NODE,
        ("roles.actor.freeze=[]", "roles.actor.prefix_saved=group", "schedule=serial", *FEW),
    ),
    "trained tower": (NODE, ("roles.actor.freeze=[]", *FEW)),
    "no weight sharing": (NODE, ("ablate=[weight_sharing]", *FEW)),
    "no weight sharing, trained tower": (NODE, ("ablate=[weight_sharing]", "roles.actor.freeze=[]", *FEW)),
    "two pools": (CLUSTER, ("schedule=disaggregated", "cluster.rollout_gpus=16")),
    "two pools, trained tower": (
        CLUSTER,
        ("schedule=disaggregated", "cluster.rollout_gpus=16", "roles.actor.freeze=[]"),
    ),
    "partial rollout": (CLUSTER, ("workload.rollout={kind: partial, share: 0.8}",)),
    "oversampling": (CLUSTER, ("workload.rollout={kind: oversample, factor: 1.25}", "schedule=serial")),
    "two pools of a node": (NODE, ("schedule=disaggregated", "cluster.rollout_gpus=4", *TP4, *FEW)),
    "no state offload": (NODE, ("ablate=[state_offload]", *FEW)),
    "no chunked optimizer": (NODE, ("ablate=[chunked_optimizer]", *FEW)),
    "no rollout release": (NODE, ("ablate=[rollout_release]", *FEW)),
    "lora": (NODE, (LORA, *FEW)),
    "lora, serial, chunks": (NODE, (LORA, "schedule=serial", "optimizer.chunks=4", *FEW)),
    "lora, naive": (NODE, (LORA, "schedule=naive", *FEW)),
    "lora, merged": (NODE, (MERGED, *FEW)),
    "lora, no weight sharing": (NODE, (LORA, "ablate=[weight_sharing]", *FEW)),
    "lora, a reference of its own": (NODE, (LORA, TP4[1], *FEW)),
    "lora, two pools": (CLUSTER, (LORA, "schedule=disaggregated", "cluster.rollout_gpus=16")),
    "lora, distributed optimizer": (CLUSTER, (LORA, "roles.actor.train.distributed_optimizer=true")),
    "lora, pipeline": (CLUSTER, (LORA, "roles.actor.train.pipeline_parallel=2")),
}


OTHERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "a reward model": ("grpo_reward_model", "examples/jobs/reward_model_32b_h800x8.yaml", ("workload.prompts=8",)),
    "dynamic sampling": ("dapo", "examples/jobs/dapo_32b_h800x32.yaml", ()),
}
PPO: dict[str, tuple[str, ...]] = {
    "ppo": (),
    "ppo, serial": ("schedule=serial",),
    "ppo, naive": ("schedule=naive",),
    "ppo, streamed": ("schedule=streamed", "roles.critic.model=null", "roles.critic.train.tensor_parallel=8"),
    "ppo, no chunked optimizer": ("ablate=[chunked_optimizer]", "optimizer.chunks=auto"),
    "ppo, no state offload": ("ablate=[state_offload]",),
    "ppo, critic of the same model": ("roles.critic.model=null", "roles.critic.train.tensor_parallel=8"),
    "ppo, trained towers": ("roles.critic.freeze=[]", "roles.actor.freeze=[]"),
    "ppo, with group": ("roles.critic.prefix_saved=group", "roles.actor.prefix_saved=group"),
    "ppo, critic with group, towers trained": (
        *("schedule=serial", "roles.critic.prefix_saved=group"),
        *("roles.critic.freeze=[]", "roles.actor.freeze=[]"),
    ),
    "ppo, prefix dropped": ("roles.critic.prefix_saved=dropped", "roles.actor.prefix_saved=dropped"),
}
TURNS: dict[str, tuple[str, ...]] = {
    "turns": (),
    "turns, serial": ("schedule=serial",),
    "turns, naive": ("schedule=naive",),
    "turns, two pools": ("schedule=disaggregated", "cluster.rollout_gpus=4"),
    "turns, saved state dropped": ("roles.actor.prefix_saved=dropped",),
    "turns, trained tower": ("roles.actor.freeze=[]",),
    "turns, no weight sharing": ("ablate=[weight_sharing]", "optimizer.chunks=auto"),
}
NAMES = sorted({*JOBS, *OTHERS, *PPO, *TURNS})


@cache
def plan(name: str) -> Plan:
    if name in PPO:
        return two_roles(*PPO[name])
    if name in TURNS:
        return three_turns(*TURNS[name])
    algorithm, job, overrides = OTHERS.get(name) or ("grpo", *JOBS[name])
    return compile_plan(ALGORITHMS[algorithm], load_job(job, overrides))


@pytest.mark.parametrize("name", NAMES)
def test_compiled_plans_pass(name: str) -> None:
    """Feasible or not, with every mechanism on or off."""
    assert check_plan(plan(name)) == ()


@pytest.mark.parametrize("fault", sorted(MUTANTS))
@settings(max_examples=8, deadline=None)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_a_fault_in_a_compiled_plan_is_refused(fault: str, name: str, data: st.DataObject) -> None:
    """The fault anywhere in the plan, if the plan has anything to break in this way."""
    made = list(MUTANTS[fault].make(plan(name)))
    if made:
        found = {v.kind for v in check_plan(data.draw(st.sampled_from(made)))}
        assert found & MUTANTS[fault].kinds, f"{fault} gives {sorted(found) or 'nothing'}"
