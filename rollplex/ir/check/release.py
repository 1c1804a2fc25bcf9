"""A snapshot whose pages are released at the optimizer barrier and come back with the chunks that write them.

rollout   unmap (imported) | signal                                             wait | map (imported) | signal
train                        wait | unmap | map_part | chunk 0 | map_part | .. | export | signal         wait | publish
q > 1     unmap (imported) | barrier | wait | unmap | ..                         export | map (imported) | write | ..

Where its bytes are needed is judged by the layers that a chunk writes; bytes inside of a layer lie as an engine likes.
Source: paper section 3.2, chunked update and stable-address staging.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.ir.check.facts import Facts, imports, moved, writes
from rollplex.ir.check.order import Order
from rollplex.ir.check.rules import At, Violation
from rollplex.ir.check.update import state_itemsize
from rollplex.ir.job import Job
from rollplex.ir.plan import PlannedObject
from rollplex.ir.releasing import not_releasable, stretches
from rollplex.ir.steps import Drop, Export, Map, MapPart, Publish, Step, Unmap, UnmapPart, UpdateChunk

Layers = tuple[tuple[int, int], ...]
"""Of the layers of a model in their order: parameters of a training rank up to its end, and bytes of the snapshot."""


def layers(facts: Facts) -> Layers:
    """The policy's; none where the job is refused, which `asked` tells: then a chunk is taken to write all of it."""
    job = facts.job
    if job is None:
        return ()
    return tuple((own, shared * job.itemsize) for own, shared in stretches(job))


def needed(facts: Facts, known: Layers, step: Step, o: PlannedObject) -> tuple[int, int]:
    """Bytes of an object that must have pages while a step uses it: all, but of a chunk what it reads or writes."""
    if not isinstance(step, UpdateChunk):
        return 0, o.bytes
    if o.name in facts.gradients(step.role):
        itemsize = state_itemsize(facts)
        return min(step.start * itemsize, o.bytes), min(step.stop * itemsize, o.bytes)
    if o.name == f"{step.role}.snapshot":
        return 0, min(o.bytes, next((end for own, end in known if own >= step.stop), o.bytes))
    return 0, o.bytes


def remade(facts: Facts, o: PlannedObject) -> bool:
    """Whether chunks write an object from masters: what of it is discarded is there again behind the last of them."""
    chunks = [at.step for at in facts.steps(o.process) if isinstance(at.step, UpdateChunk)]
    return any(o.name in writes(c) and any("master" in n for n in facts.permanent(c.role)) for c in chunks)


def check_release(facts: Facts, job: Job) -> Iterator[Violation]:
    """The plan releases what its job lets it, in whole pages."""
    snapshot, wanted = f"{job.policy}.snapshot", job.optimizer.snapshot
    released = [at for at in facts.steps() if isinstance(at.step, Unmap | Drop) and moved(at.step) == snapshot]
    if bool(released) != (wanted == "release") and wanted != "auto":
        says = "releases" if released else "keeps"
        yield Violation("asked", f"it {says} {snapshot}, the job's optimizer.snapshot is {wanted}", where=snapshot)
    if released and (why := not_releasable(job)):
        yield Violation("released", f"{snapshot} is not made again: {why}", released[0], snapshot)
    for at in facts.steps():
        if isinstance(at.step, MapPart | UnmapPart):
            yield from _part(facts, job, at, at.step, bool(released))


def _part(facts: Facts, job: Job, at: At, step: MapPart | UnmapPart, released: bool) -> Iterator[Violation]:
    """Pages come one by one to a snapshot alone, and go so from gradients, where it is released."""
    name, page = step.object, job.device.page_bytes
    right = f"{job.policy}.snapshot" if isinstance(step, MapPart) else f"{job.policy}.gradients"
    if name != right or not released:
        yield Violation("part", f"{name} is not {right} of a snapshot that is released", at, name)
    if step.start % page or step.stop % page or not 0 <= step.start < step.stop <= facts.objects[name].bytes:
        what = f"bytes {step.start:,} to {step.stop:,} are not whole pages of {page:,} of {name}"
        yield Violation("part", what, at, name)


def check_handed_out(facts: Facts, order: Order) -> Iterator[Violation]:
    """New pages reach who imports them before they are published; nobody maps pages that nobody has handed out."""
    for o in facts.objects.values():
        exports = [at for at in facts.steps(o.process) if isinstance(at.step, Export) and at.step.object == o.name]
        for importer in facts.importers[o.name]:
            own = (at for at in facts.steps(importer) if imports(at.step) == o.name)
            maps = [at for at in own if isinstance(at.step, Map)]
            yield from _matched(facts, order, o, exports, maps)
            yield from _published(facts, order, o, maps)
        if exports and not facts.importers[o.name]:
            yield Violation("handed-out", f"nobody imports {o.name}", exports[0], o.name)


def _matched(facts: Facts, order: Order, o: PlannedObject, exports: list[At], maps: list[At]) -> Iterator[Violation]:
    """Each import has one export of the pages that are there then."""
    if len(exports) != len(maps):
        what = f"pages of {o.name} are handed out {len(exports)} times and imported {len(maps)} times"
        yield Violation("handed-out", what, (*exports, *maps)[0], o.name)
    for export, taken in zip(exports, maps, strict=False):
        if not order.before(export, taken):
            yield Violation("handed-out", f"{o.name} may not have been handed out by then", taken, o.name)
        if export.step.window != taken.step.window:
            yield Violation("handed-out", f"{o.name} is handed out in {export.step.window}", taken, o.name)
        for move in (at for at in facts.steps(o.process) if moved(at.step) == o.name and at.index > export.index):
            yield Violation("handed-out", f"{o.name} has other pages afterwards: {move}", export, o.name)


def _published(facts: Facts, order: Order, o: PlannedObject, maps: list[At]) -> Iterator[Violation]:
    """A reader that has let go has the new pages when they are declared to be theta_k+1."""
    for at in facts.steps(o.process):
        if isinstance(at.step, Publish) and at.step.object == o.name:
            for late in (m for m in maps if not order.before(m, at)):
                yield Violation(
                    "publish-order", f"{late.process} may not have mapped its new pages by then", at, o.name
                )
