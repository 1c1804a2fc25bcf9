"""Rollplex: a compiler and a runtime for RL post-training of vision-language models.

import rollplex as rx

What an algorithm file needs is found here on first use, so that commands without an algorithm never import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rollplex.ir.dsl import (
        Algorithm,
        Critic,
        Frozen,
        HostFunction,
        Policy,
        Prompts,
        algorithm,
        at_end,
        gae,
        group_normalize,
        host,
        masked_mean,
        masked_sum,
        observe,
        sequence_mean,
        sequence_sum,
        trajectory_mean,
        whiten,
    )

__all__ = [
    "Algorithm",
    "Critic",
    "Frozen",
    "HostFunction",
    "Policy",
    "Prompts",
    "algorithm",
    "at_end",
    "gae",
    "group_normalize",
    "host",
    "masked_mean",
    "masked_sum",
    "observe",
    "sequence_mean",
    "sequence_sum",
    "trajectory_mean",
    "whiten",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rollplex' has no attribute {name!r}")
    from rollplex.ir import dsl

    return getattr(dsl, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
