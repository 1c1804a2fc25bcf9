"""Publication: exchange, rebuild, publish; one snapshot of theta_k+1, never a mixture with theta_k.

    theta-quiet | update_chunk 0 .. n-1 | exchange (q > 1) | tower to stages | rebuild copies | publish | published
Source: paper section 3.3, binding and refresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rollplex.ir.check.facts import THETA_QUIET, TOWER, Facts, writes
from rollplex.ir.check.rules import At, Violation
from rollplex.ir.check.update import LARGEST_PAGE, Update, made, updates
from rollplex.ir.steps import Exchange, Publish, Rebuild

OF_GROUP = {"broadcast": "pp", "write": "q"}
"""What is done in one group alone, and nothing else there."""


def exchange(u: Update) -> Iterator[Violation]:
    """The ranks of a rollout shard write their pieces of it into each other's pages, replicas gather shares before."""
    layout, name = u.facts.plan.summary.layout, u.snapshot
    if name is None:
        return
    gathers = [at for at in u.refreshed(name) if isinstance(at.step, Exchange) and at.index > u.last]
    if u.sharded and u.role not in u.facts.plan.processes[u.process].fully_sharded:
        yield from _of_replicas(u, name, gathers)
        gathers = gathers[1:]
    alone = layout.q <= 1 and not layout.exchange_bytes_per_gpu and not u.in_pieces
    if alone or not u.facts.objects[name].readers:
        return
    found = gathers
    if len(found) != 1:
        what = f"{name} is exchanged {len(found)} times after the last chunk"
        yield Violation("missing-exchange", what, u.chunks[-1][0], name, layout.exchange_bytes_per_gpu)
    for at in found:
        yield from _of_layout(at, layout.exchange_bytes_per_gpu)


def tower(u: Update) -> Iterator[Violation]:
    """A trained tower is on the first pipeline stage: it goes to the others, where engines roll out with it too."""
    name, stages = u.role + TOWER, u.facts.plan.processes[u.process].pipeline_parallel
    told, o = u.facts.plan.summary.layout.tower_bytes, u.facts.objects.get(u.role + TOWER)
    shared = o is not None and name in u.facts.theta and bool(o.readers)
    if o is None or not shared or stages == 1:
        if told and (o is None or o.readers):
            yield Violation("missing-exchange", f"{told:,} bytes of a tower are sent that is nowhere else", nbytes=told)
        return
    if not 0 <= o.bytes - told < LARGEST_PAGE:
        yield Violation("missing-exchange", f"{name} has {o.bytes:,} bytes, the layout sends {told:,}", object=name)
    found = [at for at in u.refreshed(name) if isinstance(at.step, Exchange)]
    right = [at for at in found if at.step == Exchange(
        window=at.step.window, group="pp", op="broadcast", object=name, nbytes=told)]  # fmt: skip
    if len(found) != 1 or len(right) != 1 or right[0].index < u.last:
        what = f"{name} is sent to the other pipeline stages {len(right)} times after the last chunk"
        yield Violation("missing-exchange", what, u.chunks[-1][0], name, told)


def _of_replicas(u: Update, name: str, gathers: list[At]) -> Iterator[Violation]:
    """Each replica updated a share: the first gather after the last chunk is over all of them."""
    first = gathers[0].step if gathers else None
    if not isinstance(first, Exchange) or first.group != "dp":
        what = f"{name} holds new weights of one replica's share only: they are not gathered over group dp"
        yield Violation("missing-exchange", what, u.chunks[-1][0], name)


def _of_layout(at: At, nbytes: int) -> Iterator[Violation]:
    assert isinstance(at.step, Exchange)
    if at.step.nbytes != nbytes:
        what = f"it moves {at.step.nbytes:,} bytes, the layout needs {nbytes:,}"
        yield Violation("missing-exchange", what, at, at.step.object, nbytes)
    if at.step.group != "q":
        what = f"it is over group {at.step.group}, the ranks of a rollout shard are group q"
        yield Violation("missing-exchange", what, at, at.step.object, nbytes)


def rebuilds(u: Update) -> Iterator[Violation]:
    """Every copy that no chunk writes is made again from the complete snapshot."""
    for name in sorted(n for n in u.facts.copies if u.facts.theta[n] == u.role and n != u.snapshot):
        found = [at for at in u.refreshed(name) if u.facts.past(at, THETA_QUIET)]
        if not found:
            yield Violation("missing-rebuild", f"{name} still holds theta_k", object=name, where=u.role)
        for again in found[1:]:
            yield Violation("missing-rebuild", f"{name} is made already by {found[0]}", again, name)
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
    """A copy of another process is filled by an exchange that the updating process enters too, with what it copies."""
    for at in found:
        if not isinstance(at.step, Exchange) or at.process == u.process:
            continue
        name, nbytes = at.step.object, u.facts.objects[at.step.object].bytes
        if at.step.nbytes != nbytes:
            yield Violation("missing-exchange", f"it moves {at.step.nbytes:,} bytes, {name} has {nbytes:,}", at, name)
        source = _partner(u, at)
        if source is None or source.index < u.last or not _same_part(u, source, name):
            what = f"{u.process} does not enter group {at.step.group} with {u.role}'s new weights after its last chunk"
            yield Violation("missing-exchange", what, at, name)


def _partner(u: Update, at: At) -> At | None:
    """The step of the updating process that meets this one: exchanges of a group meet in order."""
    assert isinstance(at.step, Exchange)
    group = at.step.group
    mine, theirs = (
        [a for a in u.facts.steps(p) if isinstance(a.step, Exchange) and a.step.group == group]
        for p in (at.process, u.process)
    )
    place = [a.index for a in mine].index(at.index)
    return theirs[place] if place < len(theirs) else None


def _same_part(u: Update, source: At, copy: str) -> bool:
    """Whether what is sent is the part of the role that the copy is of, the tower or the rest, and not a copy."""
    assert isinstance(source.step, Exchange)
    name = source.step.object
    tower = copy.endswith(TOWER) == name.endswith(TOWER)
    return tower and u.facts.theta.get(name) == u.role and name not in u.facts.copies


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


def together(u: Update) -> Iterator[Violation]:
    """What the rollout engine reads is gathered in the window in which it is published."""
    for at, _ in u.published[:1]:
        for gather in u.facts.steps(at.process):
            step = gather.step
            if not isinstance(step, Exchange) or step.group not in ("q", "refresh"):
                continue
            if u.facts.theta.get(step.object) == u.role and step.window != at.step.window:
                yield Violation("publish-order", f"published in {at.step.window}", gather, step.object)


def gathered(facts: Facts) -> Iterator[Violation]:
    """Slabs of a shard are written by every rank, shares of replicas gathered: only a whole tower comes from one."""
    for at in facts.steps():
        step = at.step
        if isinstance(step, Exchange) and any((step.op == op) != (step.group == g) for op, g in OF_GROUP.items()):
            what = f"it is a {step.op} over group {step.group}; stages are sent a tower, slabs are written over q"
            yield Violation("missing-exchange", what, at, step.object)


def before_quiet(facts: Facts) -> Iterator[Violation]:
    """Whatever rewrites or publishes weights stands behind theta-quiet and concerns weights (paper section 3.1)."""
    for at in facts.steps():
        name = at.step.object if isinstance(at.step, Publish) else made(at.step)
        if name is None:
            continue
        if name not in facts.theta:
            yield Violation("publish", f"{name} holds no weights that the update changes", at, name)
        elif not facts.past(at, THETA_QUIET):
            yield Violation("update-before-quiet", f"engines may still read {name}", at, name)


def frozen(facts: Facts) -> Iterator[Violation]:
    """Towers and base weights of a trained role that the job freezes are written by nothing: no chunk, copy, gather."""
    for at in facts.steps():
        for name in writes(at.step):
            if facts.objects[name].role in facts.trained and facts.frozen_part(facts.objects[name]):
                yield Violation("frozen-written", f"it writes {name}, which the job freezes", at, name)


def tensor_parallel(facts: Facts) -> Iterator[Violation]:
    """q training ranks make up one rollout rank, on the process of weights and on their readers'."""
    q = facts.plan.summary.layout.q
    for role in facts.trained:
        for o in (o for o in facts.objects.values() if o.role == role and o.class_ == "regenerable"):
            wide = facts.plan.processes[o.process].tensor_parallel
            for reader in o.readers:
                narrow = facts.plan.processes[reader].tensor_parallel
                if wide != q * narrow:
                    what = f"q is {q}, {o.process} has TP {wide} and {reader} TP {narrow}"
                    yield Violation("layout", what, object=o.name, where=o.name)


def ranks(facts: Facts) -> Iterator[Violation]:
    """Ranks are TP x PP x CP x DP: what says how many copies of a gradient there are to reduce."""
    for name, kind in facts.plan.processes.items():
        tp, pp, cp, dp = kind.tensor_parallel, kind.pipeline_parallel, kind.context_parallel, kind.data_parallel
        if kind.ranks != tp * pp * cp * dp:
            more = f" x PP {pp} x CP {cp}" if pp * cp > 1 else ""
            yield Violation("layout", f"{kind.ranks} ranks are not TP {tp}{more} x DP {dp}", where=name)
        for role, copies in (*kind.role_data_parallel.items(), *kind.role_replicas.items()):
            if copies < 1 or kind.ranks % copies:
                yield Violation("layout", f"{kind.ranks} ranks do not hold {copies} copies of {role}", where=name)


BY_ROLE: tuple[Callable[[Update], Iterator[Violation]], ...] = (exchange, tower, rebuilds, publish, together)


def check_publication(facts: Facts) -> Iterator[Violation]:
    """Everything that is wrong between the last chunk and the next iteration."""
    yield from before_quiet(facts)
    yield from gathered(facts)
    yield from frozen(facts)
    yield from tensor_parallel(facts)
    yield from ranks(facts)
    for update in updates(facts):
        for check in BY_ROLE:
            yield from check(update)
