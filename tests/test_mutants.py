"""Every place of compiled plans edited, one edit at a time: the checker refuses all of them but those that do no harm.

The plans are those of every schedule, of an ablation, of several nodes, of the host backend, of several trained roles.
`ROLLPLEX_MUTANTS=20` takes twenty places of each kind instead of two.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mutants.everywhere import Edit, edits
from mutants.harmless import reason

from rollplex.ir.checker import check_plan
from rollplex.ir.errors import PlanError
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import parse_plan
from rollplex.passes.pipeline import compile_plan

EXAMPLES = Path(__file__).parent.parent / "examples"
MOST = int(os.environ.get("ROLLPLEX_MUTANTS", "2"))
NODE, CLUSTER, HOST = "qwen2_5_vl_32b_h800x8", "qwen2_5_vl_32b_h800x32", "shapes_host"
FEW = ("workload.prompts=2", "optimizer.chunks=6")
PLANS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "rollplex": ("grpo", NODE, FEW),
    "serial": ("grpo", NODE, ("schedule=serial", *FEW)),
    "naive": ("grpo", NODE, ("schedule=naive", "workload.prompts=2")),
    "no weight sharing": ("grpo", NODE, ("ablate=[weight_sharing]", *FEW)),
    "four nodes": ("grpo", CLUSTER, ("workload.prompts=8",)),
    "host": ("grpo", HOST, ("workload.prompts=2",)),
    "turns": ("embodied", "embodied_7b_h800x8", ("workload.turns.count=2", "workload.prompts=4", "optimizer.chunks=6")),
    "lora": ("grpo", NODE, ("roles.actor.lora={rank: 64}", *FEW)),
    "lora, merged": ("grpo", NODE, ("roles.actor.lora={rank: 64, served: merged}", *FEW)),
}
COUNTS: Counter[str] = Counter()


@cache
def good(name: str) -> dict[str, Any]:
    algorithm, job, overrides = PLANS[name]
    loaded = load_job(EXAMPLES / f"jobs/{job}.yaml", overrides)
    return json.loads(compile_plan(load_algorithm(EXAMPLES / f"{algorithm}.py"), loaded).to_json())


def refused(plan: dict[str, Any], edit: Edit) -> bool:
    """By the form of a plan file, or by the checker."""
    try:
        return bool(check_plan(parse_plan(edit.of(plan))))
    except PlanError:
        return True


@pytest.mark.parametrize("name", PLANS)
def test_no_harmful_edit_survives(name: str) -> None:
    plan = good(name)
    survivors = []
    for edit in edits(plan, MOST, seed=len(name)):
        if why := reason(plan, edit):
            COUNTS[f"harmless: {why}"] += 1
        elif refused(plan, edit):
            COUNTS["refused"] += 1
        else:
            survivors.append(str(edit))
    assert not survivors, "\n".join(survivors)


def test_there_are_enough_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Two thousand at least; the harmless ones are counted by their reasons."""
    with capsys.disabled():
        print("\n" + "\n".join(f"  {count:6d} mutants {what}" for what, count in sorted(COUNTS.items())))
    assert COUNTS["refused"] >= 2000


def test_the_reasons_are_not_for_everything() -> None:
    """A harmless edit is a small part of all: the table of reasons must not swallow what the checker should see."""
    plan = good("rollplex")
    every = edits(plan, MOST, seed=0)
    assert sum(bool(reason(plan, e)) for e in every) < 0.25 * len(every)
