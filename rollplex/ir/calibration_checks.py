"""Whether a calibration is one for its job: of its GPU, its model and degrees, with what its sharing needs.

job.yaml:6: the calibration was measured on H200 (NVIDIA H200), the job's GPU is H800
    try: rollplex calibrate JOB --out FILE, on an H800
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollplex.ir.calibration import AGAIN, Calibration, Shape
from rollplex.ir.findings import Finding, KeyPath

if TYPE_CHECKING:
    from rollplex.ir.job import Job

_FILE: KeyPath = ("cluster", "calibration")
_KIND: KeyPath = ("sharing", "kind")
_SHAPE_KEYS: tuple[KeyPath, ...] = (("model",), ("roles",))


def calibration_rules(job: Job) -> Iterator[Finding]:
    """What was measured elsewhere or on something else says nothing; solved sharing needs a surface."""
    measured = job.cluster.calibration
    if measured is not None:
        yield from _gpu(job, measured)
        yield from _shape(job, measured)
    if job.sharing.kind == "solved":
        yield from _solved(job, measured)


def _gpu(job: Job, measured: Calibration) -> Iterator[Finding]:
    if measured.gpu.lower() != job.cluster.gpu.lower():
        what = f"the calibration was measured on {measured.gpu} ({measured.device}), the job's GPU is {job.cluster.gpu}"
        hint = "leave it out" if job.on_host else f"{AGAIN}, on a machine with {job.cluster.gpu}"
        yield Finding(_FILE, what, hint, (("cluster", "gpu"),))
    elif not job.device.is_called(measured.device):
        what = f"the calibration says {measured.gpu} and was measured on {measured.device}"
        yield Finding(_FILE, what, f"{AGAIN}, on a machine with {job.cluster.gpu}", (("cluster", "gpu"),))
    elif measured.surface is not None and measured.surface.all_sms != job.device.sms:
        what = (
            f"the calibration was measured on {measured.device} with {measured.surface.all_sms} SMs, "
            f"the table of GPUs has {job.device.name} with {job.device.sms}"
        )
        hint = f"{AGAIN}, on a whole {job.device.name} (no MIG slice, no other make of it), or leave it out"
        yield Finding(_FILE, what, hint, (("cluster", "gpu"),))


def _shape(job: Job, measured: Calibration) -> Iterator[Finding]:
    own, other = Shape.of(job), measured.shape
    apart = [name for name in Shape.model_fields if getattr(own, name) != getattr(other, name)]
    if apart:
        found, asked = (", ".join(f"{n} {getattr(s, n)}" for n in apart) for s in (other, own))
        what = f"the calibration was measured for {found}; the job has {asked}"
        yield Finding(_FILE, what, f"{AGAIN}, for this job", _SHAPE_KEYS)
    elif own.gpus > 1:
        yield from _exchange(job, own, measured)


def _exchange(job: Job, own: Shape, measured: Calibration) -> Iterator[Finding]:
    """A rank that waits for no other leaves no gaps: ranks must have been measured as the engines' ranks work."""
    degrees = f"the job trains at TP {own.train_tp} and rolls out at TP {own.rollout_tp}"
    if measured.exchange is None:
        what = f"the calibration was measured at TP 1, each rank by itself on one GPU; {degrees}"
        yield Finding(_FILE, what, f"{AGAIN}, on a machine with {own.gpus} such GPUs, or leave it out", (("roles",),))
    elif measured.exchange.stretches != (asked := stretches(job)):
        says = {True: "with sequence_parallel", False: "without sequence_parallel"}
        what = f"the calibration was measured {says[not asked]}; the job's trainer is {says[asked]}"
        yield Finding(_FILE, what, f"{AGAIN}, for this job", (("roles",),))


def stretches(job: Job) -> bool:
    """Whether between their linears the ranks of the policy's trainer keep stretches of the tokens."""
    return job.train_tp > 1 and job.trainer(job.policy).sequence_parallel


def _solved(job: Job, measured: Calibration | None) -> Iterator[Finding]:
    """A prefix runs whole, prompt by prompt: the surface must have been measured with chunks of about that length."""
    says = "kind solved chooses from what was measured of decode and prefixes beside each other"
    if measured is None or measured.surface is None:
        lacks = "the job has no calibration" if measured is None else "the calibration has no surface"
        hint = f"{AGAIN}, then cluster.calibration: FILE"
        yield Finding(_KIND, f"{says}, and {lacks}", hint, (_FILE,))
    elif measured.surface.whole(tokens := job.workload.typical_prompt) is None:
        chunks = ", ".join(str(row.chunk_tokens) for row in measured.surface.prefix)
        what = f"{says}: prefix chunks of {chunks} tokens; prefixes run whole, and a prompt has {tokens} tokens"
        yield Finding(_KIND, what, f"{AGAIN}, for this job", (_FILE, ("workload",)))
    if job.workload.turns is not None:
        what = f"{says}, for one decode a step, and the job has {job.workload.turns.count} turns"
        yield Finding(_KIND, what, "sharing.kind: mps", (("workload", "turns"),))
