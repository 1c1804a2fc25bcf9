"""Whether a job of several turns can be planned: what does not go with trajectories, what an observation holds.

job.yaml:19: partial rollout takes responses from several steps, and a trajectory's turns follow each other in one
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollplex.ir.engines import is_so
from rollplex.ir.findings import Finding, KeyPath

if TYPE_CHECKING:
    from rollplex.ir.job import Job

_TURNS: KeyPath = ("workload", "turns")


def turn_rules(job: Job) -> Iterator[Finding]:
    """What cuts rollouts short, samples again or runs whole sequences knows no turns."""
    if job.workload.turns is None:
        return
    kind = job.workload.rollout.kind
    if kind != "full":
        what = f"{kind} rollout ends decode before every response has, and a next turn needs them all"
        yield Finding(("workload", "rollout", "kind"), what, "kind: full, or no turns", (_TURNS,))
    if job.workload.dynamic_sampling is not None:
        what = "dynamic sampling judges a group by its scores, which trajectories have behind their last turn"
        yield Finding(("workload", "dynamic_sampling"), what, "null, or no turns", (_TURNS,))
    for name, role in job.roles.items():
        for work in ("train", "score"):
            section = getattr(role, work)
            if section and is_so(section.engine, "whole_sequences"):
                what = f"engine {section.engine} runs whole sequences: no turn can go on from the boundary of another"
                yield Finding(("roles", name, work, "engine"), what, "engine: megatron, or no turns", (_TURNS,))
    if job.on_host and job.workload.turns.frames:
        what = "the host engine reads observations of text: images and videos are in prompts alone"
        yield Finding((*_TURNS, "frames"), what, "frames: 0", (("cluster", "gpu"),))


def seen_rules(job: Job) -> Iterator[Finding]:
    """An observation's frames fit into its tokens, and somebody can see them."""
    turns, vision = job.workload.turns, job.spec.vision
    if turns is None or not turns.frames:
        return
    if vision is None:
        yield Finding((*_TURNS, "frames"), f"{job.spec.name} has no vision tower", "frames: 0", (("model", "name"),))
    elif (pixels := job.workload.max_pixels) and (
        tokens := vision.max_visual_tokens(turns.frames, pixels)
    ) > turns.observation_tokens:
        what = f"{turns.frames} frames of {pixels} pixels take {tokens} of {turns.observation_tokens} tokens"
        uses = (("workload", "max_pixels"), (*_TURNS, "observation_tokens"), ("model",))
        yield Finding((*_TURNS, "frames"), what, "fewer frames, smaller ones, or a larger observation_tokens", uses)
