"""Going on with a run that ended early: the same plan and job, the newest whole checkpoint.

    begin_at(out_dir, plan)    ->  Beginning(step=12, folder=.., metrics=[..], skipped=[step-16: cut off])

What may change between two parts of a run changes no bit of its results: how many steps, how patient, how often saved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from rollplex.ir.errors import Problem, RunError
from rollplex.ir.plan import Plan
from rollplex.runtime import checkpoint

PLAN = "plan.json"
MAY_CHANGE = frozenset({
    "steps", "silent_s", "step_timeout_s", "checkpoint_every", "checkpoints_kept", "reward_timeout_s", "reward_workers",
    "reward_failure", "when_short", "wandb",
})  # fmt: skip
"""Keys of the job's section `run`."""


@dataclass(frozen=True)
class Beginning:
    """Where a run begins: after `step` iterations, whose metrics there are; `folder` is None for step 0."""

    plan: str
    step: int = 0
    folder: Path | None = None
    metrics: list[dict[str, float]] = field(default_factory=list)
    skipped: list[Problem] = field(default_factory=list)


def begin_at(out_dir: Path, plan: Plan) -> Beginning:
    """The newest whole checkpoint of the run in this directory, which must be of the same plan; step 0 without one."""
    checkpoint.clear_partial(out_dir)
    digest = identity(plan)
    if not (out_dir / PLAN).exists():
        return Beginning(digest)
    _check_same(out_dir / PLAN, plan)
    folder, found, skipped = checkpoint.newest(out_dir, digest)
    if found is None:
        return Beginning(digest)
    if found.step > plan.job["run"]["steps"]:
        what = f"the run has done {found.step} steps, the job asks for {plan.job['run']['steps']}"
        raise RunError(what, where="run.steps", hint=f"--steps {found.step} or more, or a new directory")
    return Beginning(digest, found.step, folder, found.metrics, skipped)


def identity(plan: Plan) -> str:
    """sha256 of all of a plan that its results depend on."""
    return sha256(json.dumps(_of_results(plan.model_dump(mode="json", by_alias=True))).encode()).hexdigest()


def store_plan(out_dir: Path, plan: Plan) -> None:
    """Leave the plan in the run's directory, whole or as it was."""
    partial = out_dir / f"{PLAN}.partial"
    partial.write_text(plan.to_json(), encoding="utf-8")
    os.replace(partial, out_dir / PLAN)


def _of_results(data: dict[str, Any]) -> dict[str, Any]:
    run = {key: value for key, value in data["job"]["run"].items() if key not in MAY_CHANGE}
    return {**data, "job": {**data["job"], "run": run}}


def _check_same(path: Path, plan: Plan) -> None:
    """RunError naming what differs from the plan that the run began with."""
    try:
        old = _of_results(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise RunError("cannot read the plan of the run", where=path, hint="name a new directory") from None
    new = _of_results(plan.model_dump(mode="json", by_alias=True))
    if old == new:
        return
    changes = list(_changes(old.get("job"), new["job"], "")) or [
        f"{key} of the plan differs" for key in new if old.get(key) != new[key]
    ]
    shown = "; ".join(changes[:5]) + (f"; and {len(changes) - 5} more" if len(changes) > 5 else "")
    hint = f"resume with the plan it began with, {path}, or name a new directory"
    raise RunError(f"the run in this directory is another one: {shown}", where=path.parent, hint=hint)


def _changes(old: Any, new: Any, path: str) -> Iterator[str]:
    """`optimizer.lr is 0.1, the run began with 0.01`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            yield from _changes(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path} is {new!r}, the run began with {old!r}"
