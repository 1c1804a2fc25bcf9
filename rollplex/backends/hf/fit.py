"""A role with a model of its own reads what is made for the policy: its tokens, patches and positions.

roles.judge.model: video_token_id is 151656, the policy's 263
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollplex.backends.hf.model import parsed_config
from rollplex.backends.training.placement import config_of
from rollplex.ir.errors import JobError, Problem
from rollplex.ir.job import Job

SAME = ("image_token_id", "video_token_id")
SAME_VISION = ("patch_size", "temporal_patch_size", "spatial_merge_size", "in_channels", "tokens_per_second")


def check_fit(job: Job) -> None:
    """Refuse a role whose own model would read other tokens, patches or positions; JobError names all differences."""
    policy = parsed_config(config_of(job))
    problems: list[Problem] = []
    for role in (name for name, role in job.roles.items() if role.model is not None):
        where = f"roles.{role}.model"
        for what in _differences(parsed_config(config_of(job, role)), policy):
            problems.append(Problem(what, where, "take a model with the policy's tokenizer and processor"))
    if problems:
        raise JobError(*problems)


def _differences(own: Any, policy: Any) -> Iterator[str]:
    pairs = [(own, policy, key) for key in SAME]
    pairs += [(own.vision_config, policy.vision_config, key) for key in SAME_VISION]
    for one, other, key in pairs:
        if getattr(one, key) != getattr(other, key):
            yield f"{key} is {getattr(one, key)}, the policy's {getattr(other, key)}"
    if own.text_config.vocab_size < policy.text_config.vocab_size:
        yield f"it has {own.text_config.vocab_size} tokens, the policy samples from {policy.text_config.vocab_size}"
