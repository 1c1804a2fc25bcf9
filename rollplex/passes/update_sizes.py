"""What an update holds: bytes of one parameter's states, how fine its chunks are, and how many are in flight."""

from __future__ import annotations

from rollplex.backends.facts import load_facts
from rollplex.ir.errors import PassError
from rollplex.ir.job import Job
from rollplex.ir.job_section import MOST_PIECES

ADAM_TEMPORARIES = 2
"""Elements that torch's Adam allocates for each it updates: numerator and denominator of the step."""
FOREACH_TEMPORARIES = 1
"""The same for its foreach implementation, the default on GPUs, over all parameters at once: the root of v alone.

Where decay joins the gradient, a copy of that too.
"""
ALIGN = 64
"""Chunks begin at multiples of this many elements, so that vector kernels see the same lanes for any chunk size."""
MIN_CHUNKS = 64
"""Unless the job states a number, residency reserves an optimizer workspace this fine; chunk-sizes enlarges it."""


def pages(nbytes: int, page_bytes: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-nbytes // page_bytes) * page_bytes


def state_itemsize(job: Job) -> int:
    """Bytes of one element of gradient, master weight or moment: FP32, or the model's dtype if that is wider."""
    return max(4, job.itemsize)


def chunk_bytes_per_element(job: Job) -> int:
    """Master, two moments and gradient of one parameter in flight."""
    return 4 * state_itemsize(job)


def flying_bytes_per_element(job: Job, streamed: bool) -> int:
    """What one parameter of each chunk in flight takes: its streamed state; an update in place takes nothing."""
    return chunk_bytes_per_element(job) if streamed else 0


def updating_bytes_per_element(job: Job, role: str) -> int:
    """What Adam allocates for one parameter of the chunk that it updates; of those in flight, one is being updated.

    torch's fused kernel, which runs on a GPU wherever the state is, allocates nothing.
    """
    fused = not job.on_host and load_facts(job.trainer(role).engine).overlaps_update
    return 0 if fused else ADAM_TEMPORARIES * state_itemsize(job)


def streaming_bytes(parameters: int, elements: int, in_flight: int, flying: int, updating: int) -> int:
    """States of the chunks in flight, never more than there are, and what Adam allocates for one of the chunks.

    3 in flight, 100 parameters of 16 B each: chunks of 10 take 480 B, chunks of 50 take 1600 B.
    """
    return min(in_flight * elements, parameters) * flying + elements * updating


def resident_bytes(job: Job, role: str, parameters: int) -> int:
    """What torch's Adam allocates over a whole resident state; nothing where the update is streamed in chunks."""
    if not job.whole_sequences(role):
        return 0
    temporaries = FOREACH_TEMPORARIES + job.optimizer.joins_gradient
    return pages(temporaries * parameters * state_itemsize(job), job.device.page_bytes)


def reserved_elements(job: Job, parameters: int, held: int | None = None) -> int:
    """Parameters of the chunk that residency makes room for: an ablation's, or by the number the job states."""
    stated = job.optimizer.chunks
    return held or -(-parameters // (MIN_CHUNKS if stated == "auto" else int(stated)))


def chunks_in_flight(job: Job, role: str) -> int:
    """Optimizer chunks whose load, update and return overlap: one where the engine takes them one after the other."""
    return job.optimizer.in_flight if load_facts(job.trainer(role).engine).overlaps_update else 1


def workspace_name(job: Job, role: str) -> str:
    """The object of a role's optimizer chunks in flight."""
    return "optimizer.workspace" if role == job.policy else f"{role}.optimizer_workspace"


def wanted_chunks(job: Job, units: int) -> int | None:
    """The job's own number of chunks; PassError if that many equal chunks of whole units cannot be made."""
    if job.optimizer.chunks == "auto":
        return None
    wanted = int(job.optimizer.chunks)
    size = -(-units // min(wanted, units))
    below = -(-units // size)
    if below != wanted:
        above = [-(-units // (size - 1))] if size > 1 else []
        near = " or ".join(str(k) for k in (below, *above) if k <= MOST_PIECES)
        raise PassError(
            f"{units} x {ALIGN} parameters of a rank do not make {wanted} equal chunks",
            where="optimizer.chunks",
            hint=f"{near}, or auto",
        )
    return wanted
