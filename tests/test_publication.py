"""A rollout reads theta_k or theta_k+1, never a mixture: a crash anywhere in the update leaves nothing to sample from.

train     chunk 0 | chunk 1 | .. | exchange | rebuild | publish | barrier published        a crash at every bar
rollout                                                                              generate: refused, or never begun
"""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path

import pytest
from megatron_tiny import megatron_plan
from processes import children
from runtime_threads import ROLLOUT, TRAIN, InThreads
from runtime_tiny import luck, tight_plan, tiny_plan

from rollplex.backends.publication import Publication, Stamp, Subscription
from rollplex.ir.errors import EngineError
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Barrier, Exchange, Publish, Rebuild, Run, Step, UpdateChunk
from rollplex.runtime.events import RunEvent, Started, StepEntered
from rollplex.runtime.protocol import ProcessId
from rollplex.runtime.run import run_plan


def generate_of(run: InThreads) -> Run:
    steps = (s for s in run.plan.programs["rollout"] if isinstance(s, Run) and s.task == "generate")
    return next(steps)


def try_to_generate(run: InThreads, iteration: int = 1) -> None:
    """What the next iteration's rollout would do; the stamp is read before anything else."""
    step = generate_of(run)
    run.rollout.begin(iteration)
    run.rollout.run(step, dict.fromkeys(step.inputs, run.feed.maker))


class Crash(Exception):
    """Raised in the middle of an update."""


@cache
def update_steps() -> tuple[int, ...]:
    """The places of the update's steps in the trainer's program: every chunk, the publication, the barrier."""
    program = tight_plan().programs["train"]
    first = next(i for i, s in enumerate(program) if isinstance(s, UpdateChunk))
    return tuple(i for i in range(first, len(program)))


def crashed_before(place: int) -> tuple[InThreads, list[tuple[ProcessId, Step]]]:
    """A run whose trainer dies in its first iteration before step `place`; every step that was entered."""
    entered: list[tuple[ProcessId, Step]] = []
    target = tight_plan().programs["train"][place]

    def on_step(process: ProcessId, step: Step) -> None:
        if process == TRAIN and step is target:
            raise Crash
        entered.append((process, step))

    run = InThreads(tight_plan(), {"reward": luck}, on_step)
    with pytest.raises(Crash):
        run.step(0)
    return run, entered


def test_no_crash_between_chunks_or_before_publication_leaves_weights_that_rollout_would_read() -> None:
    """Between any two chunk writes the pages mix theta_0 and theta_1; before the first they still are theta_0."""
    program = tight_plan().programs["train"]
    tried = 0
    for place in update_steps():
        step = program[place]
        if not isinstance(step, UpdateChunk | Publish):
            continue
        run, entered = crashed_before(place)
        kinds = [(p, getattr(s, "task", s.kind)) for p, s in entered]
        if (TRAIN, "update_chunk") in kinds:
            assert (ROLLOUT, "generate") not in kinds[kinds.index((TRAIN, "update_chunk")) :]
        chunks = sum(isinstance(s, UpdateChunk) for _, s in entered)
        said = "theta_1 is due" if not chunks else f"theta_0 and {chunks} chunks of theta_1 were written"
        with pytest.raises(EngineError, match=f"pages of train 0: the weights are .*{said}"):
            try_to_generate(run)
        run.close()
        tried += 1
    assert tried > 4


def test_a_crash_behind_publication_leaves_the_whole_new_version() -> None:
    program = tight_plan().programs["train"]
    place = next(i for i in update_steps() if isinstance(program[i], Barrier))
    run, _ = crashed_before(place)
    assert run.rollout._published is not None
    with run.rollout._published.readable(1):
        pass
    run.close()


def test_bytes_that_nobody_published_are_refused_where_the_job_asks_for_it() -> None:
    """A forged mixture with a stamp in order: some of the new weights put back to the old ones."""
    run = InThreads(tiny_plan(run={"verify_weights": True}), {"reward": luck})
    weight = run.train.trained()["actor"].weights["model.language_model.layers.0.mlp.up_proj.weight"].view(-1)
    old = weight.clone()
    run.step(0)
    run.step(1)  # digests agree
    weight[: weight.numel() // 2].copy_(old[: weight.numel() // 2])
    with pytest.raises(EngineError) as refused:
        try_to_generate(run, 2)
    assert "the pages of theta_2 are not those that were published: digest " in str(refused.value)
    assert "try: end the run and start again" in str(refused.value)
    run.close()


def test_nothing_is_hashed_unless_the_job_asks_for_it() -> None:
    run = InThreads(tiny_plan(), {"reward": luck})
    run.step(0)
    assert run.train._publication.page.read() == Stamp(version=1)
    run.close()


def test_weights_that_change_while_they_are_read_are_refused() -> None:
    writer = Publication(None)
    reader = Subscription(writer.page.export(), "train 0", lambda: "")
    with pytest.raises(EngineError, match="a mixture: theta_0 and 1 chunks of theta_1"), reader.readable(0):
        writer.writing(0)
    writer.publish()
    with pytest.raises(EngineError, match="the weights are theta_1, and theta_0 is due"), reader.readable(0):
        pass
    with reader.readable(1):
        pass


def kills() -> dict[str, tuple[Plan, type[Step]]]:  # pyright: ignore[reportInvalidTypeForm]
    host, two = tight_plan(), megatron_plan(2)
    return {
        "between two chunks": (host, UpdateChunk),
        "before the barrier": (host, Barrier),
        "in the exchange": (two, Exchange),
        "between exchange and rebuild": (two, Rebuild),
    }


@pytest.mark.parametrize(
    "where", ["between two chunks", "before the barrier", "in the exchange", "between exchange and rebuild"]
)
def test_a_trainer_that_is_killed_in_its_update_ends_the_run_before_any_rollout(where: str, tmp_path: Path) -> None:
    """SIGKILL, in real processes: no rollout process enters generate after the first chunk."""
    plan, kind = kills()[where]
    pids: dict[ProcessId, int] = {}
    entered: list[tuple[ProcessId, Step]] = []

    def watch(event: RunEvent) -> None:
        if isinstance(event, Started):
            pids.update(event.pids)
        if isinstance(event, StepEntered):
            entered.append((event.process, event.step))
            late = isinstance(event.step, kind) and getattr(event.step, "name", "published") == "published"
            if event.process == TRAIN and late and getattr(event.step, "index", 1) == 1:
                os.kill(pids[TRAIN], signal.SIGKILL)

    with pytest.raises(EngineError, match=r"train 0 .* was killed by SIGKILL"):
        run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path / "run", progress=watch)
    assert children() == []
    writing = next(i for i, (_, step) in enumerate(entered) if isinstance(step, UpdateChunk))
    assert not [s for p, s in entered[writing:] if p.kind == "rollout" and isinstance(s, Run)]
