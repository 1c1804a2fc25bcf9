"""The update: final gradients, then chunks that cover the flat parameters exactly once with all their state at hand.

    .. backward | all_reduce (dp > 1) | grad_norm | theta-quiet | update_chunk 0 [0, a)  1 [a, 2a)  ..  n-1 [.., total)
Source: paper section 3.2, chunked update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rollplex.ir.check.facts import Facts, offloaded, reads, streams
from rollplex.ir.check.rules import At, Violation
from rollplex.ir.steps import Exchange, Publish, Rebuild, Step, UpdateChunk

LARGEST_PAGE = 2 << 20


@dataclass(frozen=True)
class Update:
    """The update of one role: its chunks, and the snapshots published afterwards."""

    facts: Facts
    role: str
    chunks: list[tuple[At, UpdateChunk]]
    published: list[tuple[At, str]]

    @property
    def process(self) -> str:
        """The process that updates."""
        return self.chunks[0][0].process

    @property
    def sharded(self) -> bool:
        """Whether each replica updates a share of the parameters only."""
        kind = self.facts.plan.processes[self.process]
        return self.role in kind.distributed_optimizer and kind.replicas(self.role) > 1

    @property
    def in_pieces(self) -> bool:
        """Whether a training rank holds some layers or experts only."""
        kind = self.facts.plan.processes[self.process]
        return kind.pipeline_parallel * kind.expert_parallel > 1

    @property
    def last(self) -> int:
        """The place of the last chunk."""
        return self.chunks[-1][0].index

    @property
    def snapshot(self) -> str | None:
        """The published object."""
        return self.published[0][1] if self.published else None

    def refreshed(self, name: str) -> list[At]:
        """Rebuilds and exchanges that make an object anew."""
        steps = self.facts.steps(self.facts.objects[name].process)
        return [at for at in steps if made(at.step) == name]


def made(step: Step) -> str | None:
    """The object that a rebuild or exchange makes anew."""
    match step:
        case Rebuild(object=name) | Exchange(object=name, op="all_gather" | "broadcast" | "write"):
            return name
        case _:
            return None


def updates(facts: Facts) -> Iterator[Update]:
    """The update of every trained role."""
    for role in facts.trained:
        chunks = [(a, a.step) for a in facts.steps() if isinstance(a.step, UpdateChunk) and a.step.role == role]
        mine = [(a, a.step.object) for a in facts.steps() if isinstance(a.step, Publish)]
        yield Update(facts, role, chunks, [(a, n) for a, n in mine if facts.objects[n].role == role])


def chunks(u: Update) -> Iterator[Violation]:
    """Chunks cover [0, total) exactly once, in order."""
    expected = 0
    for i, (at, chunk) in enumerate(u.chunks):
        if chunk.index != i:
            yield Violation("chunk-cover", f"chunk {chunk.index} stands where chunk {i} belongs", at)
        if chunk.start != expected:
            what = "are updated twice" if chunk.start < expected else "are left out"
            low, high = sorted((chunk.start, expected))
            yield Violation("chunk-cover", f"elements {low} to {high} {what}", at)
        if chunk.stop <= chunk.start:
            yield Violation("chunk-cover", f"elements {chunk.start} to {chunk.stop} are none", at)
        if at.process != u.process:
            yield Violation("chunk-cover", f"{u.process} updates {u.role} too", at)
        expected = chunk.stop
    yield from _whole(u)


def _whole(u: Update) -> Iterator[Violation]:
    """The last chunk ends where the gradients end; their bytes are rounded up to pages of at most 2 MiB.

    Where a replica updates a share, it ends where its smallest state ends: one element a parameter.
    """
    at, chunk = u.chunks[-1]
    itemsize = state_itemsize(u.facts)
    gradients = u.facts.gradients(u.role)
    kept = sorted((*u.facts.permanent(u.role), *gradients), key=lambda name: u.facts.objects[name].bytes)
    for name in kept[:1] if u.sharded else gradients:
        rest = u.facts.objects[name].bytes - chunk.stop * itemsize
        if rest < 0:
            yield Violation("chunk-cover", f"element {chunk.stop - 1} lies beyond the end of {name}", at, name)
        elif rest >= LARGEST_PAGE:
            yield Violation("chunk-cover", f"{rest // itemsize} elements of {name} are left out", at, name, rest)


def state_itemsize(facts: Facts) -> int:
    """Bytes of an element of gradient, master weight or moment: FP32, or float64 for a model in float64."""
    match facts.plan.job:
        case {"model": {"dtype": "float64"}}:
            return 8
        case _:
            return 4


def sizes(u: Update) -> Iterator[Violation]:
    """As many chunks as planned, all of the planned size but the last."""
    planned = u.facts.plan.summary.chunks.of(u.role)
    if len(u.chunks) != planned.count:
        yield Violation("chunk-size", f"{len(u.chunks)} chunks, {planned.count} are planned", where=u.role)
    for i, (at, chunk) in enumerate(u.chunks):
        size, last = chunk.stop - chunk.start, i == len(u.chunks) - 1
        if size > planned.elements or (size < planned.elements and not last):
            yield Violation("chunk-size", f"{size} elements, {planned.elements} are planned", at)


def chunk_state(u: Update) -> Iterator[Violation]:
    """A chunk has gradient, master weights and moments at hand, each once, and writes every part of the snapshot."""
    needed = (*u.facts.gradients(u.role), *u.facts.permanent(u.role))
    written = {n for _, c in u.chunks for n in c.writes if n in u.facts.theta} | {n for _, n in u.published}
    first = _lists(u.chunks[0][1])
    for at, chunk in u.chunks:
        if _lists(chunk) != first:
            yield Violation("chunk-state", f"it does not list what chunk {u.chunks[0][1].index} lists", at)
        for name in needed:
            if (times := (*chunk.reads, *chunk.streams).count(name)) != 1:
                yield Violation("chunk-state", f"it lists {name} {times} times", at, name)
        for o in (u.facts.objects[n] for n in (*chunk.reads, *chunk.streams)):
            if o.class_ == "permanent" and o.role != u.role:
                yield Violation("chunk-state", f"{o.name} belongs to {o.role or 'no role'}", at, o.name)
        for name in sorted(written - set(chunk.writes)):
            yield Violation("chunk-state", f"it leaves {name} as it was", at, name)


def _lists(chunk: UpdateChunk) -> tuple[frozenset[str], ...]:
    return frozenset(chunk.reads), frozenset(chunk.writes), frozenset(chunk.streams)


def gradients(u: Update) -> Iterator[Violation]:
    """Reduction, norm and clipping are complete before any chunk is committed (paper section 3.2)."""
    backward = [at for at, s in u.facts.runs("train", "prefix_backward") if s.role == u.role]
    norms = [at for at, s in u.facts.runs("grad_norm") if s.role == u.role]
    if len(norms) != 1:
        yield Violation("gradient-final", f"the gradient norm is taken {len(norms)} times", where=u.role)
        return
    if norms[0].index > u.chunks[0][0].index:
        yield Violation("gradient-final", f"it comes after {u.chunks[0][0]}", norms[0])
    for name in u.facts.gradients(u.role):
        if u.facts.objects[name].role != u.role:
            what = f"{name} belongs to {u.facts.objects[name].role or 'no role'}, and {u.role} is updated by it"
            yield Violation("gradient-final", what, norms[0], name)
        if name not in (*reads(norms[0].step), *streams(norms[0].step)):
            yield Violation("gradient-final", f"it reads no {name}", norms[0], name)
    for at in backward:
        if at.index > norms[0].index:
            yield Violation("gradient-final", "it adds to gradients whose norm is taken already", at)
            return
    yield from _reduced(u, backward[-1] if backward else norms[0], norms[0])


def _reduced(u: Update, backward: At, norm: At) -> Iterator[Violation]:
    kind = u.facts.plan.processes[u.process]
    for name in u.facts.gradients(u.role) if kind.replicas(u.role) > 1 else ():
        found = [a for a in u.facts.steps(u.process) if isinstance(a.step, Exchange) and a.step.object == name]
        op = "reduce_scatter" if u.sharded else "all_reduce"
        if any(name in offloaded(at.step) for at in u.facts.steps(u.process)):
            for at in found:
                yield Violation("missing-exchange", f"{name} is reduced again, its pieces were", at, name)
            continue
        inside = [a for a in found if _reduces(a.step, op) and backward.index < a.index < norm.index]
        if len(inside) != 1 or len(found) != 1:
            what = f"{name} is reduced {len(inside)} times between the last backward and its norm"
            yield Violation("missing-exchange", what, norm, name, u.facts.objects[name].bytes)
        for at in inside:
            yield from _of_object(u.facts, at)


def _of_object(facts: Facts, at: At) -> Iterator[Violation]:
    assert isinstance(at.step, Exchange)
    name, nbytes = at.step.object, facts.objects[at.step.object].bytes
    if at.step.nbytes != nbytes:
        yield Violation(
            "missing-exchange", f"it moves {at.step.nbytes:,} bytes, {name} has {nbytes:,}", at, name, nbytes
        )


def _reduces(step: Step, op: str) -> bool:
    return isinstance(step, Exchange) and (step.op, step.group) == (op, "dp")


CHECKS: tuple[Callable[[Update], Iterator[Violation]], ...] = (chunks, sizes, chunk_state, gradients)


def check_update(facts: Facts) -> Iterator[Violation]:
    """Everything that is wrong with the chunks of each role; without any update there is nothing to train."""
    if not facts.trained:
        yield Violation("publish", "no role is updated")
    asked = [str(r.args[0]) for r in facts.plan.graph if r.op == "rx.update" and r.args]
    for role in sorted(set(asked) ^ set(facts.trained)):
        what = (
            "the graph updates it, and no chunk does" if role in asked else "chunks update it, and the graph does not"
        )
        yield Violation("chunk-cover", f"{role}: {what}", where=role)
    for update in updates(facts):
        for check in CHECKS:
            yield from check(update)
