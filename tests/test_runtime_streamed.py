"""Groups trained on while others decode: the bits of the other schedules, whatever order groups complete in.

rollout  0 ================================  1 =====  2 ==  3 ========        group 0 is the longest
train                                      0 1 2 | 3                          in order: 1, 2 and 3 wait for 0
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from runtime_threads import ROLLOUT, TRAIN, InThreads
from runtime_tiny import luck, tiny_plan

from rollplex.backends.data.parts import joined, wholes_of
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.host.rollout import Decoding
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run, Signal, Step
from rollplex.runtime import feed
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.run import RunResult, run_plan

torch.set_num_threads(1)
GROUPS, STEPS = 4, 3
SCHEDULES = ("serial", "rollplex", "streamed")
ENDS = tuple(range(40))  # of 264 tokens: a response ends after some seven of them, or at its budget of 12


def plan_of(schedule: str, dtype: str, saved: str = "host", seed: int = 0, gpus: int = 1) -> Plan:
    rollout = {"engine": "host", "kv_cache_gib": "1 MiB", "runtime_gib": "512 KiB"}
    return tiny_plan(
        schedule=schedule,
        model={"dtype": dtype},
        cluster={"capacity_gib": "32 MiB", "gpus_per_node": gpus},
        roles={
            "actor": {"train": {"engine": "host"}, "rollout": rollout, "prefix_saved": saved},
            "reference": {"score": {"engine": "host"}},
        },
        workload={"prompts": GROUPS, "response_tokens": 12},
        optimizer={"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5},
        run={"steps": STEPS, "seed": seed, "silent_s": 60},
    )


def lengths(run: InThreads, process: ProcessId) -> list[int]:
    """The longest response of each group, of what a process was sent or has made."""
    values = wholes_of(run.states[process].values)
    return values["rollout"].lengths.amax(1).tolist()


def trained(plan: Plan) -> tuple[dict[str, Any], list[list[int]]]:
    """Digests, losses, norms and rewards of three steps, and how long the groups of each were."""
    run = InThreads(plan, {"reward": luck})
    run.feed._eos = ENDS
    optimizer = run.states[TRAIN].optimizer("actor")
    found, longest = dict[str, Any](), []
    for k in range(STEPS):
        run.step(k)
        metrics = run.train.finish().sums | optimizer.metrics | run.feed.metrics
        found |= {f"{name} of step {k}": value for name, value in metrics.items()}
        longest.append(lengths(run, ROLLOUT))
    found |= run.train.digests() | optimizer.digests() | run.rollout.digests()
    run.close()
    return found, longest


@pytest.mark.parametrize(("dtype", "saved"), [("float32", "host"), ("float64", "hbm"), ("float32", "dropped")])
def test_three_schedules_take_the_same_steps_to_the_bit(dtype: str, saved: str) -> None:
    """Weights, moments, samples, losses, norms and rewards; some group is longer than one behind it."""
    serial, rollplex, streamed = (trained(plan_of(schedule, dtype, saved)) for schedule in SCHEDULES)
    assert serial == rollplex == streamed
    assert any(groups != sorted(groups) for groups in streamed[1])


SEED = 25


def test_a_long_first_group_holds_up_those_behind_it() -> None:
    """Group 0 is complete last: all groups are sent at once then, in their order, and the bits stay the same."""
    seen: list[tuple[int, str]] = []

    def look(process: ProcessId, step: Step) -> None:
        if process == ROLLOUT and isinstance(step, Signal) and step.carries:
            decoding = run.rollout._decoding
            seen.append((decoding._step if isinstance(decoding, Decoding) else -1, step.event))

    plan = plan_of("streamed", "float32", seed=SEED)
    run = InThreads(plan, {"reward": luck}, look)
    run.feed._eos = ENDS
    run.step(0)
    longest = lengths(run, ROLLOUT)
    run.close()
    assert longest[0] == max(longest) > max(longest[1:])
    assert [event for _, event in seen] == [f"rollout[{m}]" for m in range(GROUPS)]
    assert [tokens for tokens, _ in seen] == [*[longest[0]] * (GROUPS - 1), -1]
    assert trained(plan) == trained(plan_of("serial", "float32", seed=SEED))


def test_groups_that_complete_early_are_trained_on_while_others_decode() -> None:
    """Decode stands still behind group 0's event until group 0 has been trained on: no deadlock, no waiting for 3."""
    order: list[str] = []

    def look(process: ProcessId, step: Step) -> None:
        if isinstance(step, Run) and step.task in ("generate", "train"):
            order.append(f"{step.task} {step.microbatch}")
        if process == ROLLOUT and isinstance(step, Run) and step.task == "generate" and step.microbatch:
            before = f"train {step.microbatch - 1}"
            run.meeting.until(lambda: before in order)
        with run.meeting.changed:
            run.meeting.changed.notify_all()

    run = InThreads(plan_of("streamed", "float32"), {"reward": luck}, look)
    run.step(0)
    run.close()
    assert order.index("train 0") < order.index("generate 2") < order.index("train 3")


# ---- ranks and processes


@cache
def result(schedule: str) -> RunResult:
    """Two GPUs, data parallel: group m of both is one event."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "end_tokens", lambda tokenizer: ENDS)
        plan = plan_of(schedule, "float32", gpus=2)
        return run_plan(plan, hosts={"reward": luck}, out_dir=Path(mkdtemp()) / "run")


def test_every_window_holds_what_the_plan_says_and_the_report_tells_what_was_hidden() -> None:
    report = result("streamed").report
    assert [row for row in report.objects if not row.as_planned] == []
    held = {(row.window, row.object): row.measured for row in report.objects}
    for name in ("actor.gradients", "rollout.kv", "actor.boundary", "reference.boundary"):
        assert held["P1 stream", name] > 0
    assert report.overlap.post_s > 0
    assert 0 <= report.overlap.post_hidden_share <= 1
    assert result("rollplex").report.overlap.post_hidden_s == 0.0


# ---- parts


def test_parts_are_joined_in_the_order_of_prompts() -> None:
    """Two ranks with three prompts each: part m has the rows of prompts m and 3 + m."""
    parts = [torch.tensor([[m], [3 + m]]) for m in range(3)]
    assert joined(parts).tolist() == [[p] for p in range(6)]
    rollouts = [Rollout(p[..., None], p, p[..., None].float(), p[..., 0], p[..., None]) for p in parts]
    assert wholes_of({f"rollout[{m}]": r for m, r in enumerate(rollouts)})["rollout"].lengths[:, 0].tolist() == [
        *range(6)
    ]
