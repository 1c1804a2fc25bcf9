"""What a plan says of responses that a step does not wait for: how many, what is kept, what it does to the update.

oversample  32 of 40 prompt groups taken, decode ends at 970 tokens, 8 discarded
"""

from __future__ import annotations

from rollplex.ir.job import Job
from rollplex.ir.plan import Tail
from rollplex.passes.inventory import CARRIED
from rollplex.passes.lengths import Decode


def tail(job: Job) -> Tail | None:
    """What the schedule says of responses that a step does not wait for."""
    kind = job.workload.rollout.kind
    if kind == "full":
        return None
    decode = Decode.of(job)
    return Tail(
        kind=kind,
        sampled=job.sampled,
        taken=job.workload.prompts,
        carried=CARRIED if kind == "partial" else "",
        ends_at_tokens=round(decode.ends, 1),
        snapshots=decode.snapshots,
    )


def tail_warnings(job: Job) -> list[str]:
    """What cutting decode's tail does to the update, and when nothing can be said of its gain."""
    kind = job.workload.rollout.kind
    if kind == "full":
        return []
    left, which = job.sampled - job.workload.prompts, f"of {job.sampled} prompt groups"
    if kind == "partial":
        found = [
            f"partial rollout: {left} {which} go on in the next step, prefilled again; a response may mix tokens of "
            f"{Decode.of(job).snapshots} snapshots, so the update is not strictly on-policy, though recorded "
            "log-probabilities keep its ratios right"
        ]
    else:
        found = [
            f"oversampling: {left} {which} are discarded; every response is of the step's snapshot, but the step "
            "prefers prompts with short responses"
        ]
    if job.overlapped:
        each, used = job.prefixes_of(job.policy), job.prompts_per_rank
        found.append(f"prefixes run before it is known which prompts complete: {each} a rank, {used} of them used")
    if job.workload.response_median is None:
        found.append(f"no workload.response_median: all responses are as long, and {kind} rollout shows no gain")
    return found
