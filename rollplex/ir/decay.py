"""Which parameters weight decay leaves alone: `optimizer.no_decay`, patterns on Hugging Face's names.

optimizer: {weight_decay: 0.1, no_decay: ["*.bias", "*norm*"]}         * any text    ? one character
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from rollplex.ir.engines import engine
from rollplex.ir.findings import Finding, KeyPath
from rollplex.ir.lora import trained_parts, trained_spec
from rollplex.ir.spec import Tensor

if TYPE_CHECKING:
    from rollplex.ir.job import Job

FUSED = {"qkv": (("q", "k", "v"), ("q_bias", "k_bias", "v_bias")), "gate_up": (("gate", "up"),)}
"""Tensors that an engine which fuses a weight holds as one parameter, by kind."""
NEAREST = 3


def decays(name: str, no_decay: Iterable[str]) -> bool:
    """Whether weight decay applies to a parameter: no pattern matches its name."""
    return not any(fnmatchcase(name, pattern) for pattern in no_decay)


def trained_tensors(job: Job) -> tuple[Tensor, ...]:
    """Everything that any role trains."""
    return tuple(t for role in job.trained for t in _of(job, role))


def decay_rules(job: Job) -> Iterator[Finding]:
    """Every pattern matches something, and none divides what an engine holds as one parameter."""
    no_decay, tensors = job.optimizer.no_decay, trained_tensors(job) if job.optimizer.no_decay else ()
    for i, pattern in enumerate(no_decay):
        if all(decays(t.name, [pattern]) for t in tensors):
            what = f"no trained parameter is called `{pattern}`"
            uses: tuple[KeyPath, ...] = (("model",), ("roles",))
            yield Finding(("optimizer", "no_decay", i), what, " or ".join(_nearest(pattern, tensors)), uses)
    for role in job.trained if no_decay else ():
        yield from _divided(job, role)


def _of(job: Job, role: str) -> Iterator[Tensor]:
    parts = trained_parts(job, role)
    return (t for t in trained_spec(job, role).tensors() if t.part in parts)


def _divided(job: Job, role: str) -> Iterator[Finding]:
    """The first fused parameter of which some tensors decay and some do not."""
    fuses, name = getattr(engine(job.trainer(role).engine), "fuses", ()), job.trainer(role).engine
    for kinds in (kinds for fused in FUSED if fused in fuses for kinds in FUSED[fused]):
        layers: dict[int | None, list[Tensor]] = {}
        for t in (t for t in _of(job, role) if t.kind in kinds):
            layers.setdefault(t.layer, []).append(t)
        for tensors in layers.values():
            left = [t.name for t in tensors if not decays(t.name, job.optimizer.no_decay)]
            if left and len(left) < len(tensors):
                together = ", ".join(t.name for t in tensors)
                what = f"engine {name} holds {together} as one parameter, of which {', '.join(left)} alone is named"
                uses: tuple[KeyPath, ...] = (("roles", role, "train", "engine"),)
                yield Finding(("optimizer", "no_decay"), what, "a pattern for all of them, or for none", uses)
                return


def _nearest(pattern: str, tensors: Sequence[Tensor]) -> list[str]:
    """Names that look most like a pattern, each once for all layers: what a user may paste."""
    names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", t.name) for t in tensors)
    text = pattern.strip("*")

    def alike(name: str) -> float:
        ends = (name, ".".join(name.split(".")[-2:]), name.split(".")[-1])
        return max(difflib.SequenceMatcher(None, text, end).ratio() for end in ends)

    return sorted(names, key=alike, reverse=True)[:NEAREST]
