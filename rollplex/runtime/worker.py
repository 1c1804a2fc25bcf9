"""The main loop of an engine process: build the engine, bind shared pages, run iterations until it is told to stop.

An error ends the process: it is sent to the controller as data, and what is a bug of ours leaves its traceback in the
process' log.
"""

from __future__ import annotations

import gc
import traceback
from collections import ChainMap
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from rollplex.backends.engine import Engine, EngineReport
from rollplex.ir.engines import engine_module
from rollplex.ir.errors import Problem, RollplexError
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan, parse_plan
from rollplex.runtime.carrying import keep, take_up
from rollplex.runtime.channel import Channel, Closed
from rollplex.runtime.checkpoint import noted
from rollplex.runtime.crew import START_S
from rollplex.runtime.executor import run_iteration
from rollplex.runtime.link import ORPHANED, ChildLink
from rollplex.runtime.protocol import (
    Answer,
    Ask,
    Assign,
    Begin,
    Failed,
    Finished,
    Ready,
    Stop,
)
from rollplex.runtime.stages import LIFE
from rollplex.runtime.state import ProcessState, engine_state


def serve(channel: Channel) -> int:
    """Serve one run; the exit status of the process."""
    link = ChildLink(channel, START_S)
    try:
        _serve(link)
        return 0
    except Closed:
        return ORPHANED
    except RollplexError as err:
        link.send(Failed(type(err).__name__, err.problems))
    except Exception as err:
        traceback.print_exc()
        link.send(Failed("bug", (Problem(f"{type(err).__name__}: {err}"),)))
    return 1


def _serve(link: ChildLink) -> None:
    assign, fds = link.command()
    assert isinstance(assign, Assign), f"the first command is {assign}"
    plan = parse_plan(assign.plan)
    job = Job.model_validate(plan.job)
    link.silent_after(job.run.silent_s)
    be_deterministic(job.run.threads, job.run.seed)
    engine = build_engine(plan, job, assign, fds, link)
    state = engine_state(assign.process, plan, job, link, engine)
    link.stage(LIFE, "sharing pages")
    _share(link, plan, state)
    link.stage(LIFE, "first values of weights" if state.updates else f"starting {_name(plan, assign)}")
    ready = engine.ready()
    link.stage(LIFE, "")
    gc.collect()
    gc.freeze()  # what is there now stays, and is not looked through again and again beside the steps
    link.send(Ready(ready))
    while _obey(link, state, job):
        pass
    engine.close()  # only here: after an error the process ends, and the kernel takes everything back


def be_deterministic(threads: int, seed: int) -> None:
    """The same bits for the same input: no nondeterministic kernel, a fixed number of threads."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    fill_memory: Any = torch.utils.deterministic
    fill_memory.fill_uninitialized_memory = False  # costs time, and our results do not read what they did not write


def build_engine(plan: Plan, job: Job, assign: Assign, fds: list[int], link: ChildLink) -> Engine:
    """The backend's engine for this process; `fds` are the ledgers of its device, of the host, and of its peers."""
    process = assign.process
    link.stage(LIFE, f"importing {_name(plan, assign)}")
    backend = import_module(engine_module(_name(plan, assign)))
    link.stage(LIFE, "taking memory")
    return backend.build(plan, job, process.kind, process.rank, fds, Path(assign.meeting))


def _name(plan: Plan, assign: Assign) -> str:
    """Of the process' engine."""
    return plan.processes[assign.process.kind].engine


def _share(link: ChildLink, plan: Plan, state: ProcessState) -> None:
    """Hand out the pages that others map, and take those of others: each object crosses once, in plan order."""
    for name, pages in state.memory.export().items():
        link.hand_out(name, pages)
    for o in plan.summary.objects:
        for owner in state.memory.owners(o.name):
            state.memory.adopt(o.name, owner, link.pages(o.name, owner), "start")


def _obey(link: ChildLink, state: ProcessState, job: Job) -> bool:
    """One command; False after Stop."""
    command, _ = link.command()
    match command:
        case Begin(iteration):
            run_iteration(state, iteration)
            link.send(Finished(iteration, _report(state)))
        case Ask("save", path):
            state.memory.save(Path(path))
            link.send(Answer("save", {"path": path}))
        case Ask("digests"):
            link.send(Answer("digests", _digests(state)))
        case Ask("checkpoint", path):
            link.send(Answer("checkpoint", keep(state, job, Path(path))))
        case Ask("restore", path):
            take_up(state, job, Path(path), noted(Path(path), str(state.process)))
            link.send(Answer("restore", {}))
        case Stop():
            return False
        case _:
            raise AssertionError(f"not a command: {command}")
    return True


def _report(state: ProcessState) -> EngineReport:
    report = state.memory.finish()
    updates = state.updates.values()
    lanes = (*state.lanes, *(span for update in updates for span in update.spans))
    metrics = dict(ChainMap({}, report.metrics, *(update.metrics for update in updates)))
    return replace(report, metrics=metrics, lanes=lanes)


def _digests(state: ProcessState) -> dict[str, str]:
    return dict(ChainMap({}, state.memory.digests(), *(update.digests() for update in state.updates.values())))
