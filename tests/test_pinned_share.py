"""A small pinned pool: the plan says what stays in HBM for want of host memory, and what the pool would have to be."""

from __future__ import annotations

import re

import pytest

from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes.pipeline import compile_plan

JOB = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"
CROWDED = re.compile(r"could wait in host memory and stay in HBM in (.*): a GPU's share .* is (\S+) GiB .* (\S+) GiB$")


def compiled(*overrides: str) -> Plan:
    return compile_plan(load_algorithm("examples/grpo.py"), load_job(JOB, overrides))


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_pool_that_is_too_small_is_named(share: float) -> None:
    """1400 GB over 8 GPUs; what lies in HBM unused for want of it, added to what is planned, is more than the share."""
    plan = compiled(f"cluster.pinned_share={share}")
    (found,) = [m for w in plan.summary.warnings if (m := CROWDED.search(w))]
    window, told, wanted = found.groups()
    assert not plan.feasible
    assert window == plan.summary.peak_window
    assert float(told) == round(1400e9 * share / 8 / 2**30, 1)
    moving = [o for o in plan.summary.objects if o.class_ == "permanent" and o.residency[window] == "hbm"]
    idle = sum(o.bytes for o in moving if window not in o.consumed and "context" not in o.name)
    assert float(wanted) == round((plan.summary.peak_host_bytes + idle) / 2**30, 1)
    assert any(f"cluster.pinned_share {share:g} of 1400 GB, over 8 GPUs" in w for w in plan.summary.warnings)


def test_a_pool_with_room_is_not() -> None:
    """Neither where all fits, nor where HBM alone is short: the KV cache leaves nothing that could wait elsewhere."""
    assert not [w for w in compiled().summary.warnings if CROWDED.search(w)]
    over = compiled("roles.actor.rollout.kv_cache_gib=70")
    assert not over.feasible
    assert not [w for w in over.summary.warnings if CROWDED.search(w)]
