"""Update and publication: chunks over final gradients, then exchange, rebuild, publish; one snapshot, never a mixture.

    theta-quiet | update_chunk 0 .. n-1 | exchange (q > 1) | rebuild copies | publish | published
Sources: paper section 3.2 (chunked update), section 3.3 (binding and refresh).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rollplex.ir.check.facts import THETA_QUIET, Facts
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
        return [at for at in steps if _made(at.step) == name]


def _made(step: Step) -> str | None:
    match step:
        case Rebuild(object=name) | Exchange(object=name, op="all_gather"):
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
    """The last chunk ends where the gradients end; their bytes are rounded up to pages of at most 2 MiB."""
    at, chunk = u.chunks[-1]
    itemsize = state_itemsize(u.facts)
    for name in u.facts.gradients(u.role):
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
    planned = u.facts.plan.summary.chunks.optimizer
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
        if name not in norms[0].step.reads:  # type: ignore[union-attr]
            yield Violation("gradient-final", f"it reads no {name}", norms[0], name)
    for at in backward:
        if at.index > norms[0].index:
            yield Violation("gradient-final", "it adds to gradients whose norm is taken already", at)
            return
    yield from _reduced(u, backward[-1] if backward else norms[0], norms[0])


def _reduced(u: Update, backward: At, norm: At) -> Iterator[Violation]:
    kind = u.facts.plan.processes[u.process]
    for name in u.facts.gradients(u.role) if kind.data_parallel > 1 else ():
        found = [a for a in u.facts.steps(u.process) if isinstance(a.step, Exchange) and a.step.object == name]
        inside = [a for a in found if a.step.op == "all_reduce" and backward.index < a.index < norm.index]  # type: ignore[union-attr]
        if len(inside) != 1 or len(found) != 1:
            what = f"{name} is reduced {len(inside)} times between the last backward and its norm"
            yield Violation("missing-exchange", what, norm, name, u.facts.objects[name].bytes)


def exchange(u: Update) -> Iterator[Violation]:
    """With q > 1 the ranks of a rollout shard gather each other's pieces of the shared snapshot."""
    layout, name = u.facts.plan.summary.layout, u.snapshot
    if name is None or layout.q <= 1 or not u.facts.objects[name].readers:
        return
    found = [at for at in u.refreshed(name) if isinstance(at.step, Exchange) and at.index > u.last]
    if len(found) != 1:
        what = f"{name} is gathered {len(found)} times after the last chunk"
        yield Violation("missing-exchange", what, u.chunks[-1][0], name, layout.exchange_bytes_per_gpu)
    for at in found:
        nbytes = at.step.nbytes  # type: ignore[union-attr]
        if nbytes != layout.exchange_bytes_per_gpu:
            what = f"it moves {nbytes:,} bytes, the layout needs {layout.exchange_bytes_per_gpu:,}"
            yield Violation("missing-exchange", what, at, name, nbytes)


def rebuilds(u: Update) -> Iterator[Violation]:
    """Every copy that no chunk writes is made again from the complete snapshot."""
    for name in sorted(n for n in u.facts.copies if u.facts.theta[n] == u.role and n != u.snapshot):
        found = [at for at in u.refreshed(name) if u.facts.past(at, THETA_QUIET)]
        if not found:
            yield Violation("missing-rebuild", f"{name} still holds theta_k", object=name, where=u.role)
        yield from _rebuilt_late(u, found)
        yield from _sent(u, found)
    shared = u.snapshot is not None and u.facts.objects[u.snapshot].readers
    rebuilt = any(isinstance(at.step, Rebuild) for at in u.facts.steps())
    case3 = u.facts.plan.summary.layout.case3_buffer_bytes
    if shared and rebuilt != (case3 > 0):
        what = f"case-3 tensors have {case3:,} bytes, and {'something is' if rebuilt else 'nothing is'} rebuilt"
        yield Violation("missing-rebuild", what, nbytes=case3, where=u.role)


def _rebuilt_late(u: Update, found: list[At]) -> Iterator[Violation]:
    gathers = u.refreshed(u.snapshot) if u.snapshot else []
    for at in found:
        if not isinstance(at.step, Rebuild):
            continue
        if u.snapshot not in at.step.reads:
            yield Violation("missing-rebuild", f"it is not made from {u.snapshot}", at, at.step.object)
        late = [g for g in (*gathers, u.chunks[-1][0]) if g.index > at.index]
        if late:
            yield Violation("publish-order", f"it comes before {late[0]}", at, at.step.object)


def _sent(u: Update, found: list[At]) -> Iterator[Violation]:
    """A copy of another process is filled by an exchange that the updating process enters too, with the snapshot."""
    sent = [at.step for at in (u.refreshed(u.snapshot) if u.snapshot else ()) if at.index > u.last]
    groups = {step.group for step in sent if isinstance(step, Exchange)}
    for at in found:
        if isinstance(at.step, Exchange) and at.process != u.process and at.step.group not in groups:
            what = f"{u.process} does not enter group {at.step.group} with {u.snapshot} after its last chunk"
            yield Violation("missing-exchange", what, at, at.step.object)


def publish(u: Update) -> Iterator[Violation]:
    """One publication, behind everything that makes the snapshot."""
    if not u.published:
        yield Violation("publish", f"theta_k+1 of {u.role} is never published", where=u.role)
        return
    for at, name in u.published[1:]:
        yield Violation("publish", f"{u.role} is published already by {u.published[0][0]}", at, name)
    at, name = u.published[0]
    if not any(name in c.writes for _, c in u.chunks):
        yield Violation("publish", f"{name} is published, and no chunk writes it", at, name)
    made = [c for c, _ in u.chunks]
    made += [
        r for n, role in u.facts.theta.items() if role == u.role for r in u.refreshed(n) if r.process == at.process
    ]
    late = [m for m in made if m.index > at.index]
    if late:
        yield Violation("publish-order", f"{late[0]} comes after it", at, name)


def before_quiet(facts: Facts) -> Iterator[Violation]:
    """Whatever rewrites or publishes weights stands behind theta-quiet and concerns weights (paper section 3.1)."""
    for at in facts.steps():
        name = at.step.object if isinstance(at.step, Publish) else _made(at.step)
        if name is None:
            continue
        if name not in facts.theta:
            yield Violation("publish", f"{name} holds no weights that the update changes", at, name)
        elif not facts.past(at, THETA_QUIET):
            yield Violation("update-before-quiet", f"engines may still read {name}", at, name)


def tensor_parallel(facts: Facts) -> Iterator[Violation]:
    """q training ranks make up one rollout rank, on the snapshot's process and on its readers'."""
    q = facts.plan.summary.layout.q
    for role in facts.trained:
        for o in (o for o in facts.objects.values() if facts.theta.get(o.name) == role):
            wide = facts.plan.processes[o.process].tensor_parallel
            for reader in o.readers:
                narrow = facts.plan.processes[reader].tensor_parallel
                if wide != q * narrow:
                    what = f"q is {q}, {o.process} has TP {wide} and {reader} TP {narrow}"
                    yield Violation("layout", what, object=o.name, where=o.name)


CHECKS: tuple[Callable[[Update], Iterator[Violation]], ...] = (
    chunks, sizes, chunk_state, gradients, exchange, rebuilds, publish,
)  # fmt: skip


def check_publication(facts: Facts) -> Iterator[Violation]:
    """Everything that is wrong with phase P3; without any update there is nothing to train."""
    if not facts.trained:
        yield Violation("publish", "no role is updated")
    yield from before_quiet(facts)
    yield from tensor_parallel(facts)
    for update in updates(facts):
        for check in CHECKS:
            yield from check(update)
