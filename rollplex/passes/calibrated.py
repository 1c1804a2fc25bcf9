"""What a reader should know about predictions that rest on a calibration: where they go beyond what was measured.

the calibration has decode batches up to 128; 256 responses of an engine decode at once: they are taken as 128
"""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.ir.job import Job
from rollplex.passes.co_run import surface_of
from rollplex.passes.lengths import Lengths


def calibration_warnings(job: Job) -> Iterator[str]:
    """Batches and contexts outside of what was measured, and a surface that nothing here is told by."""
    if (measured := job.cluster.calibration) is None:
        return
    live = job.sampled_per_engine[-1] * job.group
    surface = measured.surface
    batches = (measured.most_batch, *((surface.batches[-1],) if surface else ()))
    if live > min(batches):
        yield (
            f"the calibration has decode batches up to {min(batches)}; {live} responses of an engine decode at once: "
            f"they are taken as {min(batches)}"
        )
    longest, most = job.workload.typical_prompt + Lengths.of(job).longest, max(row.context for row in measured.decode)
    if longest > most * SLACK:
        yield f"the calibration has contexts up to {most} tokens; responses end at {longest}: they are taken as {most}"
    if surface and job.overlapped and surface_of(job) is None:
        yield (
            "the calibration's co-run surface is not used: it is of whole prompts of about one length, one decode a "
            "step and prefixes alone beside it; decode's slowdown is the assumed one"
        )


SLACK = 1.02
"""The last tokens of the longest response are a part of one step in a hundred."""
