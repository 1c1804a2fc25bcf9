"""Small algorithms for tests: a body becomes a file that is loaded, traced and compiled under the 32B example job."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import torch
from torch import Tensor

from rollplex.ir.dsl import Algorithm
from rollplex.ir.job import Job, load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.module import Module
from rollplex.passes.infer_types import InferTypes
from rollplex.passes.prefix_split import PrefixSplit

EXAMPLES = Path(__file__).parents[1] / "examples"
SIGNATURE = "prompts, *, actor, reference, reward, n=8, clip=0.2"
FIRST_LINE = 6  # of the body
HEAD = """\
import torch
import rollplex as rx

@rx.algorithm
def made({signature}):
"""

# Lines that many bodies share: what a loss is made of.
START = """\
rollout = actor.generate(prompts, n=n)
logp = actor.logprobs(prompts, rollout)
score = rx.host(reward)(prompts, rollout)
"""


def source(body: str, signature: str = SIGNATURE) -> str:
    """A file with one algorithm, its body from line 6 on."""
    return HEAD.format(signature=signature) + indent(dedent(body), "    ")


def made(folder: Path, body: str, signature: str = SIGNATURE) -> Algorithm:
    """The algorithm of a body."""
    path = folder / "made.py"
    path.write_text(source(body, signature), encoding="utf-8")
    return load_algorithm(path)


@cache
def job(*overrides: str) -> Job:
    """The 32B job on eight GPUs: 32 prompts, 8 responses, 8192 + 2048 tokens."""
    return load_job(EXAMPLES / "jobs" / "qwen2_5_vl_32b_h800x8.yaml", overrides)


def grpo() -> Algorithm:
    """The example."""
    return load_algorithm(EXAMPLES / "grpo.py")


def typed(algorithm: Algorithm, params: Mapping[str, Any] | None = None, *overrides: str) -> Module:
    """The algorithm after infer-types."""
    return InferTypes().run(Module(algorithm.trace(params), job(*overrides), algorithm))


def split(algorithm: Algorithm, params: Mapping[str, Any] | None = None, *overrides: str) -> Module:
    """The algorithm after prefix-split."""
    return PrefixSplit().run(typed(algorithm, params, *overrides))


def step_values(prompts: int, group: int, length: int, seed: int = 0) -> dict[str, Any]:
    """What models and hosts give in one step, in float64: responses of different lengths, log-probabilities, scores."""
    random = torch.Generator().manual_seed(seed)
    shape = (prompts, group, length)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    lengths = torch.randint(1, length + 1, shape[:2], generator=random)
    mask = torch.arange(length) < lengths[..., None]
    rollout = {
        "tokens": torch.zeros(shape, dtype=torch.int64),
        "mask": mask,
        "lengths": lengths,
        "logprobs": -draw(*shape).abs(),
    }
    return {"rollout": rollout, "score": draw(*shape[:2]), "ref_logp": -draw(*shape).abs(), "logp": -draw(*shape).abs()}
