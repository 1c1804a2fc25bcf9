"""What leaves HBM in pieces: gradients, beside the last step that writes them, each byte once and reduced before.

    run prefix_backward actor mb 3    [24, 32)  [16, 24)  [8, 16)  [0, 8)      then the tower's: [40, 48)  [32, 40)

Parameters lie in the order of the forward, so a backward ends each part from its end to its beginning: a plan whose
pieces stood in another order would hold up all behind the first. Source: paper section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from rollplex.ir.check.facts import Facts, offloaded
from rollplex.ir.check.rules import At, Violation
from rollplex.ir.check.update import state_itemsize
from rollplex.ir.job import Job
from rollplex.ir.lora import trained_parts, trained_spec
from rollplex.ir.shards import rank_parameters
from rollplex.ir.steps import Piece, Run

ROUNDED_S = 1e-6


def check_pieces(facts: Facts, job: Job) -> Iterator[Violation]:
    """Every run with pieces, and every piece."""
    for at in facts.steps():
        if isinstance(at.step, Run) and at.step.offloads:
            yield from _of_step(facts, job, at, at.step)
    yield from _hidden(facts, job)


def _hidden(facts: Facts, job: Job) -> Iterator[Violation]:
    """What is hidden of the way to the host is less than all of it; nothing is where nothing leaves in pieces."""
    told = facts.plan.summary.times.hidden_offload_s
    moved = sum(facts.objects[name].bytes for at in facts.steps() for name in offloaded(at.step))
    whole = moved / (job.device.host_link_gb_s * 1e9)
    if told > whole + ROUNDED_S or (told == 0) != (moved == 0):
        what = f"{told:.6f} s of the gradients' way to the host are hidden, all of it in pieces is {whole:.6f} s"
        yield Violation("times", what, where="times")


def _of_step(facts: Facts, job: Job, at: At, step: Run) -> Iterator[Violation]:
    names = {piece.object for piece in step.offloads}
    for name in sorted(names):
        if step.task != "prefix_backward" or name not in facts.gradients(step.role):
            what = f"{name} leaves in pieces, and no backward of {step.role or 'its role'} ends it here"
            yield Violation("piece", what, at, name)
            return
    name = names.pop()
    yield from _cover(facts, at, step.offloads, name)
    yield from _aligned(job, at, step.offloads, name)
    yield from _order(facts, job, at, step)
    yield from _reduced(facts, at, step)


def _cover(facts: Facts, at: At, pieces: tuple[Piece, ...], name: str) -> Iterator[Violation]:
    """Every byte leaves once."""
    end, nbytes = 0, facts.objects[name].bytes
    for piece in sorted(pieces, key=lambda p: p.start):
        if piece.start != end or piece.stop <= piece.start:
            low, high = sorted((piece.start, end))
            what = "twice" if piece.start < end else "never" if piece.start > end else "in a piece of none"
            yield Violation("piece", f"bytes {low:,} to {high:,} of {name} leave {what}", at, name, high - low)
        end = piece.stop
    if end != nbytes:
        yield Violation("piece", f"pieces of {name} end at byte {end:,} of {nbytes:,}", at, name, abs(nbytes - end))


def _aligned(job: Job, at: At, pieces: tuple[Piece, ...], name: str) -> Iterator[Violation]:
    page = job.device.page_bytes
    for piece in pieces:
        if piece.start % page or piece.stop % page:
            what = f"bytes {piece.start:,} to {piece.stop:,} of {name} are not whole pages of {page:,}"
            yield Violation("piece", what, at, name)


def _order(facts: Facts, job: Job, at: At, step: Run) -> Iterator[Violation]:
    """Down from the end of the language model, then down from the end of the tower."""
    name = step.offloads[0].object
    nbytes = facts.objects[name].bytes
    edge = _language_bytes(facts, job, step.role, nbytes)
    first = step.offloads[0].stop
    if abs(first - edge) >= job.device.page_bytes:
        what = f"the language model's part of {name} ends at byte {edge:,}, the first piece at {first:,}"
        yield Violation("piece", what, at, name)
    for before, piece in pairwise(step.offloads):
        if piece.stop != (before.start or nbytes):
            what = f"bytes {piece.start:,} to {piece.stop:,} of {name} are not what the backward ends next"
            yield Violation("piece", what, at, name)


def _language_bytes(facts: Facts, job: Job, role: str, nbytes: int) -> int:
    """Gradients of the language model, which lie before those of the tower."""
    parts = trained_parts(job, role)
    if parts == ("language", "vision"):
        held = rank_parameters(trained_spec(job, role), job.degrees(role), "language")
        return min(nbytes, held * state_itemsize(facts))
    return nbytes


def _reduced(facts: Facts, at: At, step: Run) -> Iterator[Violation]:
    """Gradients of replicas are summed piece by piece, before each leaves."""
    kind = facts.plan.processes[at.process]
    cut = step.role in kind.distributed_optimizer
    right = ("reduce_scatter" if cut else "all_reduce") if kind.replicas(step.role) > 1 else ""
    for piece in step.offloads:
        if piece.reduce != right:
            what = f"bytes {piece.start:,} to {piece.stop:,} have the reduction '{piece.reduce}', ranks need '{right}'"
            yield Violation("missing-exchange", what, at, piece.object, piece.stop - piece.start)
