"""The graph of the tiny plans, and its loss taken apart by hand.

prompts -> rollout, kv_reference -> ref_logp, kv_actor -> logp, score
mask = rollout.mask;  wide = unsqueeze(score, -1);  gain = (logp - ref_logp) * wide;  loss = masked_mean(gain, mask)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinyjob import GROUP

from rollplex.ir.plan import LossPlan, NodeRecord, Plan


def node(name: str, op: str, *args: Any, phase: str = "", **kwargs: Any) -> NodeRecord:
    """A record; an argument that begins with % is a reference."""
    refs = ({"ref": a[1:]} if isinstance(a, str) and a.startswith("%") else a for a in args)
    return NodeRecord(name=name, op=op, args=tuple(refs), kwargs=kwargs, phase=phase)


MASK, WIDE = node("mask", "rx.field", "%rollout", "mask"), node("wide", "torch.unsqueeze", "%score", -1)
SUB, GAIN = node("sub", "operator.sub", "%logp", "%ref_logp"), node("gain", "operator.mul", "%sub", "%wide")


def graph(windows: Mapping[str, str]) -> tuple[NodeRecord, ...]:
    """The records, each in the phase of its window; maths is in P2."""
    phase = {name: window[:2] for name, window in windows.items()}
    maths = (MASK, WIDE, SUB, GAIN, node("loss", "rx.masked_mean", "%gain", "%mask"))
    return (
        node("prompts", "input", phase="P1"),
        node("rollout", "rx.generate", "actor", "%prompts", phase="P1", n=GROUP),
        node("kv_reference", "rx.prefix", "reference", "%prompts", phase=phase["reference"]),
        node("ref_logp", "rx.suffix", "reference", "%kv_reference", "%rollout", phase="P2"),
        node("kv_actor", "rx.prefix", "actor", "%prompts", phase=phase["actor"]),
        node("logp", "rx.suffix", "actor", "%kv_actor", "%rollout", phase="P2"),
        node("score", "rx.host", "reward", "%prompts", "%rollout", phase="P2"),
        *(record.model_copy(update={"phase": "P2"}) for record in maths),
        node("update_actor", "rx.update", "actor", "%loss", phase="P3"),
    )


def loss() -> LossPlan:
    """loss = sum over groups of masked_sum(gain, mask) / count of the whole mask."""
    return LossPlan(
        role="actor",
        loss="loss",
        step=(MASK, WIDE, node("mask.count", "rx.mask_count", "%mask")),
        group=(
            SUB, GAIN, node("loss.sum", "rx.masked_sum", "%gain", "%mask"),
            node("loss", "rx.portion", "%loss.sum", "%mask.count"),
        ),
        result="loss",
        forward=("logp",),
        wide=("mask.count",),
        wide_inputs=("rollout",),
        sliced=("ref_logp", "wide", "mask"),
        whole=("mask.count",),
        divisor="mask.count",
        divisor_inputs=("rollout",),
    )  # fmt: skip


def centred(plan: Plan) -> Plan:
    """The plan with another loss: logp less the mean of ref_logp over all prompts, which mixes them."""
    center, sub = node("center", "torch.mean", "%ref_logp"), node("sub", "operator.sub", "%logp", "%center")
    at = next(i for i, r in enumerate(plan.graph) if r.name == "sub")
    mine = (r.model_copy(update={"phase": "P2"}) for r in (center, sub))
    was = loss()
    taken = was.model_copy(
        update={
            "step": (*was.step[:2], center, was.step[2]),
            "group": (sub, *was.group[1:]),
            "wide": ("center", "mask.count"),
            "wide_inputs": ("ref_logp", "rollout"),
            "sliced": ("wide", "mask"),
            "whole": ("center", "mask.count"),
        }
    )
    return plan.model_copy(
        update={"graph": (*plan.graph[:at], *mine, *plan.graph[at + 1 :]), "losses": {"actor": taken}}
    )
