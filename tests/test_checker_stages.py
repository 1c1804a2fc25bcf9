"""The checker on a plan of two pipeline stages with a trained tower: what the first stage alone has goes to the other.

train    .. | P3 update  chunk 0 .. | P3 publish  write snapshot over q, broadcast vision over pp, rebuild, publish
"""

from __future__ import annotations

from functools import cache

import pytest
from mutants.edit import change, insert, move, put, steps, with_layout

from rollplex.ir.checker import check_plan
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange, UpdateChunk
from rollplex.passes.pipeline import compile_plan

X32 = "examples/jobs/qwen2_5_vl_32b_h800x32.yaml"
STAGES = ("roles.actor.train.pipeline_parallel=2", "workload.prompts=8", "optimizer.chunks=6")


@cache
def staged(*overrides: str) -> Plan:
    return compile_plan(load_algorithm("examples/grpo.py"), load_job(X32, [*STAGES, *overrides]))


def broken(plan: Plan) -> dict[str, str]:
    """The rules that a plan breaks, and what is said first of each."""
    found: dict[str, str] = {}
    for v in check_plan(plan):
        found.setdefault(v.kind, v.what)
    return found


def towers(plan: Plan) -> list[tuple[str, int, Exchange]]:
    return [found for found in steps(plan, Exchange) if found[2].op == "broadcast"]


TRAINED = "roles.actor.freeze=[]"


def test_a_trained_tower_is_sent_once_and_a_frozen_one_never() -> None:
    """All bytes of the tower, over the stages, between the gather and the publication."""
    plan = staged(TRAINED)
    assert not broken(plan)
    ((process, at, step),) = towers(plan)
    assert (process, step.group, step.object) == ("train", "pp", "actor.vision")
    assert step.nbytes == plan.summary.layout.tower_bytes == 2 * load_job(X32).spec.vision_parameters
    assert [s.kind for s in plan.programs["train"][at - 1 : at + 3]] == ["exchange", "exchange", "rebuild", "publish"]
    assert not towers(staged())
    assert not towers(staged(TRAINED, "ablate=[weight_sharing]"))  # it has a copy of its own, which is refreshed


def test_a_tower_that_other_stages_do_not_get_is_found() -> None:
    plan = staged(TRAINED)
    ((process, at, _),) = towers(plan)
    what = "actor.vision is sent to the other pipeline stages 0 times after the last chunk"
    assert what in broken(put(plan, process, at))["missing-exchange"]


@pytest.mark.parametrize("fields", [{"nbytes": 1}, {"group": "tp"}, {"op": "all_gather"}])
def test_a_tower_that_is_sent_otherwise_is_found(fields: dict[str, object]) -> None:
    plan = staged(TRAINED)
    ((process, at, step),) = towers(plan)
    assert "missing-exchange" in broken(put(plan, process, at, change(step, **fields)))


def test_a_tower_that_is_sent_twice_or_too_early_is_found() -> None:
    plan = staged(TRAINED)
    ((process, at, step),) = towers(plan)
    first = next(i for p, i, _ in steps(plan, UpdateChunk) if p == process)
    assert "missing-exchange" in broken(insert(plan, process, at, step))
    assert "missing-exchange" in broken(move(plan, process, at, first))


def test_a_layout_that_forgets_the_tower_is_found() -> None:
    assert "missing-exchange" in broken(with_layout(staged(TRAINED), tower_bytes=0))
    assert "missing-exchange" in broken(with_layout(staged(), tower_bytes=1))
