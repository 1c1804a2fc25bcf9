"""The form of a plan file: numbers are numbers of the right sort, and what is wrong is told with its place."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from tinyplan import tiny_plan

from rollplex.ir.errors import PlanError
from rollplex.ir.job import load_job
from rollplex.ir.plan import parse_plan, read_plan
from rollplex.ir.planned_job import job_of
from rollplex.ir.steps import Piece, Step, named


@cache
def _text() -> str:
    return tiny_plan().to_json()


def with_value(path: str, value: Any) -> dict[str, Any]:
    """The tiny plan as parsed JSON with one value replaced: `summary.windows.0.seconds`."""
    data = json.loads(_text())
    *holders, key = path.split(".")
    inner = data
    for part in holders:
        inner = inner[int(part)] if isinstance(inner, list) else inner[part]
    inner[key] = value
    return data


WRONG: tuple[tuple[str, Any, str], ...] = (
    ("summary.objects.0.bytes", -1, "should be greater than or equal to 0"),
    ("summary.objects.0.bytes", 16.0, "should be a valid integer"),
    ("summary.objects.0.bytes", True, "should be a valid integer"),
    ("summary.objects.0.slots", 0, "should be greater than or equal to 1"),
    ("summary.objects.0.attached", 1, "should be a valid boolean"),
    ("summary.windows.0.hbm_bytes", "8", "should be a valid integer"),
    ("summary.windows.0.seconds", -1.0, "should be greater than or equal to 0"),
    ("summary.windows.0.seconds", float("inf"), "should be a finite number"),
    ("summary.capacity_bytes", 2**63, "should be less than 9223372036854775808"),
    ("summary.layout.q", 1.0, "should be a valid integer"),
    ("summary.policy.share", 1.5, "should be less than 1"),
    ("processes.train.ranks", 2.0, "should be a valid integer"),
    ("programs.train.3.microbatch", -1, "should be greater than or equal to 0"),
    ("feasible", "yes", "should be a valid boolean"),
)


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_a_number_of_another_sort_is_refused(path: str, value: Any, message: str) -> None:
    """pydantic alone would take 16.0 and true for whole numbers and "yes" for true."""
    with pytest.raises(PlanError) as caught:
        parse_plan(with_value(path, value))
    assert message in str(caught.value)
    assert caught.value.problems[0].where.startswith("plan: " + path.split(".")[0])


@pytest.mark.parametrize("text", ["NaN", "Infinity", "9" * 5000])
def test_a_text_with_no_json_number_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(f'{{"schema_version": {text}}}')
    with pytest.raises(PlanError, match="not JSON"):
        read_plan(file)


def test_a_file_without_an_end_is_refused() -> None:
    """A plan is read for its first GiB at most."""
    with pytest.raises(PlanError, match="cannot read the plan: more than 1024 MiB"):
        read_plan("/dev/zero")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("cluster.gpu", "H800x", "job.cluster.gpu: no GPU `H800x`\n    try: H800"),
        ("workload.prompts", 0, "job.workload.prompts: Input should be greater than or equal to 1"),
        ("roles.actor.rollout.tensor_parallel", 3, "q = 8 / 3 = 8/3"),
    ],
)
def test_a_plan_for_a_job_that_would_be_refused_is_refused(path: str, value: Any, message: str) -> None:
    """The job inside a plan may be edited too."""
    job = load_job("examples/jobs/qwen2_5_vl_32b_h800x8.yaml").model_dump(mode="json")
    *sections, key = path.split(".")
    inner = job
    for part in sections:
        inner = inner[part]
    inner[key] = value
    with pytest.raises(PlanError) as caught:
        job_of(tiny_plan().model_copy(update={"job": job}))
    assert message in str(caught.value)


OBJECTS = ("object", "reads", "writes", "streams", "offloads")
"""Fields of steps that name objects."""


def step_of(kind: type) -> Any:
    """A step of a class with another object in each of those fields, one of them twice, and no more."""
    values = {
        "object": "a.object", "reads": ("a.read", "a.both"), "writes": ("a.both",), "streams": ("a.stream",),
        "offloads": (Piece(object="a.piece", start=0, stop=1), Piece(object="a.piece", start=1, stop=2)),
    }  # fmt: skip
    return kind.model_construct(**{name: value for name, value in values.items() if name in kind.model_fields})


@pytest.mark.parametrize("kind", get_args(get_args(Step)[0]), ids=lambda kind: kind.__name__)
def test_every_object_of_a_step_is_named_once(kind: type) -> None:
    """By its fields: pages of some bytes are its object's too, and its last use may be that they go."""
    step = step_of(kind)
    wanted = {
        "object": ["a.object"], "reads": ["a.read", "a.both"], "writes": ["a.both"], "streams": ["a.stream"],
        "offloads": ["a.piece"],
    }  # fmt: skip
    found = {name for field in OBJECTS if hasattr(step, field) for name in wanted[field]}
    assert sorted(named(step)) == sorted(found)
