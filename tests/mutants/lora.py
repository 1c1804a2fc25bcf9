"""Faults of plans with adapters: a base is written, adapters are not served, a reference reads what is not its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mutants.edit import change, insert, mutant, objects, place, put, steps, unlist, with_object
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange, Publish, Rebuild, Run, UpdateChunk

ADAPTERS = "rollout.adapters"


def bases(plan: Plan) -> list[str]:
    """Base weights, and what the rollout engine has made of them."""
    own = [name for name in objects(plan) if name.endswith((".base", ".case3"))]
    return own if any(name.endswith(".base") for name in own) else []


def readers(plan: Plan, *tasks: str) -> Iterator[tuple[str, int, Run, str]]:
    """Tasks that read base weights, and which."""
    for process, i, step in steps(plan, Run):
        for name in bases(plan):
            if step.task in tasks and name in step.reads:
                yield process, i, step, name


@mutant("frozen-written")
def base_written_by_a_chunk(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, UpdateChunk):
        for name in bases(plan):
            if objects(plan)[name].process == process:
                yield put(plan, process, i, change(step, writes=(*step.writes, name)))


@mutant("frozen-written")
def base_rebuilt_every_step(plan: Plan) -> Iterator[Plan]:
    """What was made once is made again in P3."""
    window = plan.summary.windows[-1].name
    for name in bases(plan):
        process = objects(plan)[name].process
        to = place(plan, process, "published")
        yield insert(plan, process, to, Rebuild(window=window, object=name, reads=(name,)))


@mutant("frozen-written")
def base_gathered(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Publish):
        for name in bases(plan):
            if objects(plan)[name].process == process:
                gather = Exchange(window=step.window, group="q", op="write", object=name, nbytes=1)
                yield put(plan, process, i, gather, step)


@mutant("frozen-written")
def base_written_by_backward(plan: Plan) -> Iterator[Plan]:
    for process, i, step, name in readers(plan, "train"):
        yield put(plan, process, i, change(step, writes=(*step.writes, name)))


@mutant("task-objects")
def base_hidden(plan: Plan) -> Iterator[Plan]:
    """A task of the policy, of decode or of a reference that is the base itself leaves it out of its list."""
    tasks = ("prefix", "suffix", "train", "whole", "prefix_backward", "generate")
    for process, i, step, name in readers(plan, *tasks):
        yield put(plan, process, i, unlist(step, name))


@mutant("task-objects")
def decode_without_adapters(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Run):
        if step.task == "generate" and ADAPTERS in step.reads:
            yield put(plan, process, i, unlist(step, ADAPTERS))


@mutant("missing-rebuild")
def adapters_stay_at_theta_k(plan: Plan) -> Iterator[Plan]:
    """Neither side enters the exchange that fills the rollout engine's buffers."""
    if ADAPTERS in objects(plan):
        programs = {
            p: tuple(s for s in program if not (isinstance(s, Exchange) and s.group == "refresh"))
            for p, program in plan.programs.items()
        }
        yield plan.model_copy(update={"programs": programs})


@mutant("missing-exchange")
def too_few_adapters_sent(plan: Plan) -> Iterator[Plan]:
    found = [(p, i, s) for p, i, s in steps(plan, Exchange) if s.group == "refresh" and ADAPTERS in objects(plan)]
    if found:
        programs = dict(plan.programs)
        for process, i, step in found:
            short = change(step, nbytes=step.nbytes - 1)
            programs[process] = (*programs[process][:i], short, *programs[process][i + 1 :])
        yield plan.model_copy(update={"programs": programs})


@mutant("asked")
def adapters_of_another_rank(plan: Plan) -> Iterator[Plan]:
    """Buffers with room for twice the rank."""
    if ADAPTERS in objects(plan):
        yield with_object(plan, ADAPTERS, bytes=2 * objects(plan)[ADAPTERS].bytes)


@mutant("layout-buffer")
def case3_of_another_size(plan: Plan) -> Iterator[Plan]:
    for name in bases(plan):
        if name.endswith(".case3"):
            yield with_object(plan, name, bytes=2 * objects(plan)[name].bytes)


@mutant("chunk-cover")
def base_updated_too(plan: Plan) -> Iterator[Plan]:
    """The job trains all weights, and the plan its adapters."""
    for role in {s.role for _, _, s in steps(plan, UpdateChunk)} if bases(plan) else ():
        yield with_job(plan, role, lora=None)


@mutant("asked")
def base_of_another_model(plan: Plan) -> Iterator[Plan]:
    """A reference whose model is its own reads the policy's base."""
    policies = {s.role for _, _, s in steps(plan, UpdateChunk)}
    for role in {step.role for _, _, step, _ in readers(plan, "prefix", "suffix", "whole")} - policies:
        yield with_job(plan, role, model={"name": "Qwen2.5-VL-7B"})


def with_job(plan: Plan, role: str, **keys: Any) -> Plan:
    """The plan with other keys of a role in its job."""
    job = json.loads(json.dumps(plan.job))
    job["roles"][role] |= keys
    return plan.model_copy(update={"job": job})
