"""Compiled plans pass the checker, and every fault of mutants/ in them is refused by the rule that it breaks."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import MUTANTS

from rollplex.ir.checker import check_plan
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes.pipeline import compile_plan

GRPO = load_algorithm("examples/grpo.py")
NODE, CLUSTER = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", "examples/jobs/qwen2_5_vl_32b_h800x32.yaml"
FEW = ("workload.prompts=4",)
TP4 = ("roles.actor.train.tensor_parallel=4", "roles.reference.score.tensor_parallel=4")
JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rollplex": (NODE, FEW),
    "serial": (NODE, ("schedule=serial", *FEW)),
    "naive": (NODE, ("schedule=naive", *FEW)),
    "four nodes": (CLUSTER, ()),
    "saved state at the host": (NODE, ("roles.actor.prefix_saved=host", *FEW)),
    "saved state in HBM": (NODE, ("roles.actor.prefix_saved=hbm", *FEW)),
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
}


@cache
def plan(name: str) -> Plan:
    job, overrides = JOBS[name]
    return compile_plan(GRPO, load_job(job, overrides))


@pytest.mark.parametrize("name", JOBS)
def test_compiled_plans_pass(name: str) -> None:
    """Feasible or not, with every mechanism on or off."""
    assert check_plan(plan(name)) == ()


@pytest.mark.parametrize("fault", sorted(MUTANTS))
@settings(max_examples=8, deadline=None)
@given(name=st.sampled_from(sorted(JOBS)), data=st.data())
def test_a_fault_in_a_compiled_plan_is_refused(fault: str, name: str, data: st.DataObject) -> None:
    """The fault anywhere in the plan, if the plan has anything to break in this way."""
    made = list(MUTANTS[fault].make(plan(name)))
    if made:
        found = {v.kind for v in check_plan(data.draw(st.sampled_from(made)))}
        assert found & MUTANTS[fault].kinds, f"{fault} gives {sorted(found) or 'nothing'}"
