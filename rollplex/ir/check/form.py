"""Form: names that exist, owners that move their own, windows and barriers in order.

All other checks take names and owners for granted: they are asked only of plans in which nothing is wrong with those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from rollplex.ir.check.facts import TIMELINE, Facts, imports, moved, streams, writes
from rollplex.ir.check.rules import At, Violation
from rollplex.ir.plan import BARRIERS, SCHEMA_VERSION
from rollplex.ir.steps import Barrier, Exchange, Publish, Rebuild, Run, Step, UpdateChunk, named


def schema(facts: Facts) -> Iterator[Violation]:
    """The version is the one that this program reads (design.md section 5)."""
    version = facts.plan.schema_version
    if version != SCHEMA_VERSION:
        yield Violation("schema", f"schema_version {version}, this program reads {SCHEMA_VERSION}")


def own_names(facts: Facts) -> Iterator[Violation]:
    """No two objects or windows share a name."""
    for what, found in (
        ("object", [o.name for o in facts.plan.summary.objects]),
        ("window", [w.name for w in facts.plan.summary.windows]),
    ):
        for name, count in Counter(found).items():
            if count > 1:
                yield Violation("duplicate-name", f"{count} {what}s are named {name}", object=name)


def lists(facts: Facts) -> Iterator[Violation]:
    """No list of a step or an object names anything twice."""
    for at in facts.steps():
        for field in ("reads", "writes", "streams", "inputs", "outputs", "carries"):
            yield from _twice(vars(at.step).get(field, ()), field, at)
    for o in facts.plan.summary.objects:
        yield from _twice(o.readers, f"readers of {o.name}", None)
        yield from _twice(o.consumed, f"consumed of {o.name}", None)
    for name, kind in facts.plan.processes.items():
        for what in ("distributed_optimizer", "fully_sharded"):
            yield from _twice(getattr(kind, what), f"{what} of {name}", None)
    for place in facts.plan.summary.host_pool.offsets:
        yield from _twice(place.windows, f"windows of {place.object} at the host", None)


def _twice(names: tuple[str, ...], field: str, at: At | None) -> Iterator[Violation]:
    for name, count in Counter(names).items() if len(set(names)) < len(names) else ():
        if count > 1:
            yield Violation("duplicate-name", f"{field} has {name} {count} times", at, object=name)


def known_names(facts: Facts) -> Iterator[Violation]:
    """Steps name windows and objects of the plan, objects name processes of the plan."""
    yield from _processes(facts)
    windows = set(facts.windows)
    for at in facts.steps():
        if at.step.window not in windows:
            yield Violation("unknown-name", f"the plan has no window {at.step.window}", at)
        for name in named(at.step):
            if name not in facts.objects:
                yield Violation("unknown-name", f"the plan has no object {name}", at, object=name)
    for w in facts.plan.summary.windows:
        for name in w.by_object:
            if name not in facts.objects:
                yield Violation("unknown-name", f"the plan has no object {name}", object=name, where=w.name)


def _processes(facts: Facts) -> Iterator[Violation]:
    programs, kinds = set(facts.programs), set(facts.plan.processes)
    for name in sorted({TIMELINE, *programs, *kinds}):
        if name not in programs or name not in kinds:
            missing = "program" if name not in programs else "entry in processes"
            yield Violation("unknown-name", f"process {name} has no {missing}")
    for o in facts.objects.values():
        for process in (o.process, *o.readers):
            if process not in programs:
                yield Violation("unknown-name", f"no process is named {process}", object=o.name, where=o.name)


def owners(facts: Facts) -> Iterator[Violation]:
    """Owners move and write; readers read, after importing (paper section 3.2, stable-address staging)."""
    for o in facts.objects.values():
        said = o.name.partition(".")[0]
        if said in facts.programs and said != o.process:
            yield Violation("not-owner", f"it is {said}'s by its name, and {o.process}'s", object=o.name, where=o.name)
    for at in facts.steps():
        for name in named(at.step):
            o = facts.objects.get(name)
            if o is not None and o.process != at.process:
                yield from _foreign(at, name, o.process, o.readers)


def _foreign(at: At, name: str, owner: str, readers: tuple[str, ...]) -> Iterator[Violation]:
    changed = {moved(at.step), *writes(at.step), *streams(at.step)}
    if name in changed or isinstance(at.step, Publish):
        yield Violation("not-owner", f"{name} belongs to {owner}", at, object=name)
    elif at.process not in readers:
        yield Violation("not-imported", f"{name} belongs to {owner}, and {at.process} imports no page of it", at, name)


def own_imports(facts: Facts) -> Iterator[Violation]:
    """An owner does not import from itself; its ranks do from each other what q of them write together."""
    chunks = (at.step for at in facts.steps() if isinstance(at.step, UpdateChunk))
    shared = {name for step in chunks for name in writes(step) if facts.plan.summary.layout.q > 1}
    for at in facts.steps():
        name = imports(at.step)
        own = name in facts.objects and facts.objects[name].process == at.process
        if name and own and not (name in shared and facts.objects[name].readers):
            yield Violation("not-owner", f"{name} is its own: nothing to import", at, object=name)


def window_order(facts: Facts) -> Iterator[Violation]:
    """Windows follow each other in every program; the timeline's program has a step in each."""
    rank = {name: i for i, name in enumerate(facts.windows)}
    for process in facts.programs:
        last = -1
        for at in facts.steps(process):
            here = rank.get(at.step.window, last)
            if here < last:
                yield Violation("window-order", f"it stands behind a step of {facts.windows[last]}", at)
            last = max(last, here)
    seen = {at.step.window for at in facts.steps(TIMELINE)} if TIMELINE in facts.programs else set()
    for name in facts.windows:
        if name not in seen:
            yield Violation("window-order", f"{TIMELINE} has no step in it", where=name)


def barriers(facts: Facts) -> Iterator[Violation]:
    """Each of the three barriers once in every program, in the order of paper section 3.1; nothing behind the last."""
    for process, steps in facts.programs.items():
        found = [s.name for s in steps if isinstance(s, Barrier)]
        counts = Counter(found)
        for name in dict.fromkeys([*BARRIERS, *found]):
            if name not in BARRIERS:
                yield Violation("barrier", f"meets {name}, which is no barrier", where=process)
            elif counts[name] != 1:
                yield Violation("barrier", f"meets barrier {name} {counts[name]} times", where=process)
        if sorted(found) == sorted(BARRIERS) and tuple(found) != BARRIERS:
            yield Violation("collective-order", f"meets the barriers as {', '.join(found)}", where=process)
        if found and not isinstance(steps[-1], Barrier):
            at = At(process, len(steps) - 1, steps[-1])
            yield Violation("after-published", f"it stands behind the last barrier, {found[-1]}", at)


_WORK = (Run, UpdateChunk, Exchange, Rebuild, Publish)


def phases(facts: Facts) -> Iterator[Violation]:
    """Work stands between the barriers of its window's phase; what ends a window may stand just behind its barrier."""
    phase = {w.name: int(w.phase[1:]) for w in facts.plan.summary.windows}
    for process in facts.programs:
        now = 1
        for at in facts.steps(process):
            planned = phase.get(at.step.window, now)
            if not _in_phase(at.step, planned, now):
                yield Violation("phase", f"a step of phase P{planned} stands in phase P{now}", at)
            now += isinstance(at.step, Barrier)


def _in_phase(step: Step, planned: int, now: int) -> bool:
    if isinstance(step, (*_WORK, Barrier)):
        return planned == now
    return planned <= now <= planned + 1


Check = Callable[[Facts], Iterator[Violation]]
NAMES: tuple[Check, ...] = (schema, own_names, lists, known_names, owners, own_imports)
SHAPE: tuple[Check, ...] = (window_order, barriers, phases)


def check_names(facts: Facts) -> tuple[Violation, ...]:
    """What makes a plan unreadable: nothing else can be said of it."""
    return tuple(v for check in NAMES for v in check(facts))


def check_shape(facts: Facts) -> tuple[Violation, ...]:
    """Windows and barriers out of order."""
    return tuple(v for check in SHAPE for v in check(facts))
