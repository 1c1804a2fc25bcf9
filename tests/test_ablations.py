"""Figure 8 of the paper: the full schedule fits, and without any one mechanism it does not, each in the paper's window.

full schedule     P1 decode is the peak, below capacity
no state offload  over in P1, before any optimizer step        resident rollout, whole update, two copies  over in P3
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from capacities import without_remedies

from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes.pipeline import compile_plan

EXAMPLES = Path(__file__).parent.parent / "examples"
JOB = EXAMPLES / "jobs/qwen2_5_vl_32b_h800x8.yaml"
GRPO = load_algorithm(EXAMPLES / "grpo.py")
BUDGETS = {"the whole budget": 8192, "the longest median of the paper": 5900, "the shortest": 470}
FIRST_OVER = {
    "state_offload": "P1 prefix-reference",
    "rollout_release": "P3 update",
    "chunked_optimizer": "P3 update",
    "weight_sharing": "P3 update",
}


@cache
def compiled(*overrides: str) -> Plan:
    """The paper's memory microbenchmark: 32B on one node of 8 H800."""
    return without_remedies(GRPO, load_job(JOB, overrides))


@pytest.mark.parametrize("tokens", BUDGETS.values(), ids=BUDGETS)
def test_the_full_schedule_stays_below_capacity(tokens: int) -> None:
    """The dashed line of the figure is never touched."""
    plan = compiled(f"workload.prompt_tokens={tokens}")
    assert plan.feasible
    assert plan.summary.peak_hbm_bytes < plan.summary.capacity_bytes < 80 * 10**9 * 1.07


@pytest.mark.parametrize("tokens", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("mechanism", FIRST_OVER)
def test_without_one_mechanism_it_does_not_fit(mechanism: str, tokens: int) -> None:
    """The first window over capacity is where the paper saw it, at the full budget and at its median lengths."""
    plan = compiled(f"ablate=[{mechanism}]", f"workload.prompt_tokens={tokens}")
    assert plan.infeasible is not None
    assert plan.infeasible.window == FIRST_OVER[mechanism]
    assert plan.infeasible.shortfall_bytes > 2**30


def test_an_ablation_keeps_the_update_of_the_full_schedule_and_says_so() -> None:
    """Its chunks, three in flight, fill what the full schedule has free once gradients and frozen weights have left."""
    plan, full = compiled("ablate=[weight_sharing]"), compiled()
    chunks = plan.summary.chunks.optimizer
    window = next(w for w in full.summary.windows if w.name == "P3 update")
    leaves = ("optimizer.workspace", "actor.gradients", "reference.weights")
    stays = sum(nbytes for name, nbytes in window.by_object.items() if name not in leaves)
    free = full.summary.capacity_bytes - stays
    assert free - 2 * 2**20 < chunks.workspace_bytes <= free + 2 * 2**20  # pages of 2 MiB
    assert any("holds the update of the full schedule: 4 chunks" in w for w in plan.summary.warnings)


def test_finer_chunks_make_up_for_a_second_copy_where_the_arithmetic_differs_from_the_paper() -> None:
    """Two copies of the weights fit once the update takes small chunks: told as a remedy, and true."""
    found = compile_plan(GRPO, load_job(JOB, ["ablate=[weight_sharing]"])).infeasible
    assert found is not None
    told = [r.change for r in found.remedies if r.change.startswith("optimizer.chunks=")]
    assert told
    assert compiled("ablate=[weight_sharing]", told[0]).feasible


def test_a_chunk_that_is_held_is_never_finer_than_chunks_may_be() -> None:
    """On a GPU without any room the full schedule has no largest chunk: the finest there may be, and over capacity."""
    plan = compiled("ablate=[state_offload]", "cluster.capacity_gib=8")
    assert plan.infeasible is not None
    assert plan.summary.chunks.optimizer.count <= 4096
