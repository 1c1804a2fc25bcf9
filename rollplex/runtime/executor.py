"""Runs one program: a `match` over the closed union of steps, every step announced, timed and checked for residency.

    run_iteration(state, 7)      executes state.program once; state.link reaches the other processes

A plan that reads what is not there (a fetch is missing, an unmap came too early) ends here in an EngineError that
names the step and the object, before the step runs.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from rollplex.ir.errors import EngineError
from rollplex.ir.steps import (
    Barrier,
    Drop,
    Exchange,
    Export,
    Fetch,
    Map,
    MapPart,
    Offload,
    Publish,
    Rebuild,
    Run,
    Signal,
    Step,
    Unmap,
    UnmapPart,
    UpdateChunk,
    Wait,
    describe,
    role_of,
    touched,
)
from rollplex.runtime.holding import await_turn
from rollplex.runtime.pieces import leaving
from rollplex.runtime.state import ProcessState, take


def run_iteration(state: ProcessState, iteration: int) -> None:
    """Execute the program once; raises what the failing step raised, with nothing at work behind it."""
    state.iteration, state.window = iteration, ""
    state.values.clear()
    state.lanes.clear()
    state.tasks.begin(iteration)
    try:
        for index, step in enumerate(state.program):
            state.link.enter(iteration, index)
            _enter_window(state, step)
            held_ns = await_turn(state, step)
            start_ns = time.monotonic_ns()
            execute(state, step)
            if state.engine is not None:
                state.engine.objects.settle()
                _forget(state, index)
            state.link.leave(iteration, index, start_ns, time.monotonic_ns(), held_ns)
    finally:
        for update in state.updates.values():
            update.close()


def execute(state: ProcessState, step: Step) -> None:
    """One step. Waits and barriers block; who ends them is said in link.py and barriers.py."""
    text = describe(step)
    check_residency(state, step, text)
    match step:
        case Map(object=name, imported=False):
            state.memory.objects.map(name, text)
            state.produced.discard(name)
        case Map(object=name):  # imported pages stay, unless their owner lets them go (paper section 3.2)
            for owner in state.memory.owners(name):
                state.memory.adopt(name, owner, state.link.pages(name, owner), text)
            state.produced |= state.imported & {name}
        case Unmap(object=name, imported=True):
            state.memory.let_go(name, text)
            state.produced -= state.imported & {name}
        case Unmap(object=name):
            state.memory.objects.unmap(name, text)
            state.produced.discard(name)
        case MapPart(object=name, start=start, stop=stop):
            state.memory.objects.map_part(name, start, stop, text)
        case UnmapPart(object=name, start=start, stop=stop):
            state.memory.objects.unmap_part(name, start, stop, text)
        case Export(object=name):
            state.link.hand_out(name, state.memory.objects.handed_out(name))
        case Fetch(object=name):
            state.memory.objects.fetch(name, text)
            state.produced.add(name)
        case Offload(object=name):
            state.memory.objects.offload(name, text)
            state.produced.discard(name)
        case Drop(object=name):
            state.memory.objects.drop(name, text)
            state.produced.discard(name)
        case Run():
            _run(state, step, text)
        case UpdateChunk():
            with _measured(state, step, text):
                state.optimizer(step.role).chunk(step)
            _wrote(state, step.writes, text)
        case Exchange():
            state.memory.exchange(step)
        case Rebuild():
            state.memory.rebuild(step)
            _wrote(state, (step.object,), text)
        case Publish():
            state.optimizer(role_of(step.object)).publish(step)
        case Signal(event=event, carries=names):
            state.link.signal(event, take(state.values, names))
        case Wait(event=event):
            state.values.update(state.link.wait(event))
        case Barrier(name=name):
            state.link.barrier(name)


def check_residency(state: ProcessState, step: Step, text: str) -> None:
    """Refuse a step whose objects are not in HBM, not produced, or (streams) not on the host."""
    if state.engine is None:
        return
    objects = state.engine.objects
    for name in touched(step):
        if not objects.mapped(name):
            raise _residency_error(state, f"{text} uses {name}, which is not mapped", f"map or fetch {name} before it")
    for name in step.reads if isinstance(step, Run | UpdateChunk | Rebuild) else ():
        if name not in state.produced:
            what = f"{text} reads {name}, whose pages hold nothing yet"
            raise _residency_error(state, what, f"fetch {name} instead of mapping it, or run its producer first")
    for name in step.streams if isinstance(step, Run | UpdateChunk) else ():
        if not objects.mapped(name) and not objects.on_host(name):
            what = f"{text} streams {name}, which has no place in the pinned pool"
            raise _residency_error(state, what, f"plan {name} on the host in window {step.window}")


def _run(state: ProcessState, step: Run, text: str) -> None:
    missing = [name for name in step.inputs if name not in state.values]
    if missing:
        what = f"{text} takes {', '.join(missing)}, which this process neither made nor received"
        raise _residency_error(state, what, "wait for the event that carries it")
    if step.task == "grad_norm":
        scale = state.memory.scale(step, take(state.values, step.inputs))
        outputs = dict.fromkeys(step.outputs, state.optimizer(step.role).norm(scale))
    else:
        for name in step.streams if step.task == "prefix" else ():  # all other tasks stream what is there
            state.memory.objects.put(name, text)
        with leaving(state, step), _measured(state, step, text):
            outputs = state.tasks.run(step, take(state.values, step.inputs))
    assert set(outputs) == set(step.outputs), f"{text} made {sorted(outputs)}, planned {sorted(step.outputs)}"
    state.values.update(outputs)
    gone = {piece.object for piece in step.offloads}
    state.produced -= gone
    _wrote(state, tuple(name for name in step.writes if name not in gone), text)


def _forget(state: ProcessState, index: int) -> None:
    """Places in the pinned pool that nothing needs behind this step, for those that the plan puts there next."""
    for name in state.last_uses.get(index, ()):
        state.memory.objects.forget(name, describe(state.program[index]))


def _measured(state: ProcessState, step: Run | UpdateChunk, text: str) -> AbstractContextManager[None]:
    return state.engine.objects.measure(step.writes, text) if state.engine else nullcontext()


def _wrote(state: ProcessState, names: tuple[str, ...], text: str) -> None:
    if names:
        state.memory.objects.wrote(names, text)
        state.produced.update(names)


def _enter_window(state: ProcessState, step: Step) -> None:
    if step.window != state.window:
        state.window = step.window
        if state.engine is not None:
            state.engine.objects.window(step.window)


def _residency_error(state: ProcessState, what: str, hint: str) -> EngineError:
    return EngineError(what, where=f"{state.process}, window {state.window}", hint=hint)
