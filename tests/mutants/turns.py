"""Faults of turns: trajectories that lose their KV, their rank or their history, figures that forget a turn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from mutants.agree import with_job
from mutants.edit import change, insert, move, mutant, put, steps, summarise, unlist, with_object, without
from rollplex.ir.plan import NodeRecord, Plan
from rollplex.ir.planned_turns import Trajectories
from rollplex.ir.steps import Map, Run, Unmap, Wait


def _told(plan: Plan, **fields: Any) -> Plan:
    assert plan.summary.trajectories is not None
    return summarise(plan, trajectories=plan.summary.trajectories.model_copy(update=fields))


def _pieces(plan: Plan) -> list[str]:
    """Boundary pieces that a later turn goes on from."""
    told = plan.summary.trajectories
    return [name for names in told.pieces.values() for name in names[:-1]] if told else []


def _record(plan: Plan, r: NodeRecord, **fields: Any) -> Plan:
    return plan.model_copy(
        update={"graph": tuple(r.model_copy(update=fields) if x.name == r.name else x for x in plan.graph)}
    )


def _later(plan: Plan, *tasks: str) -> Iterator[tuple[str, int, Run]]:
    """Runs of later turns, by what they read of earlier ones."""
    for process, i, step in steps(plan, Run):
        if step.task in tasks and set(step.reads) & {*_pieces(plan), "rollout.kv"} and step.node[-1:].isdigit():
            yield process, i, step


# ---- what is told


@mutant("trajectory")
def turns_not_told(plan: Plan) -> Iterator[Plan]:
    if told := plan.summary.trajectories:
        yield summarise(plan, trajectories=None)
        for key in ("turns", "tokens"):
            yield _told(plan, **{key: getattr(told, key) + 1})
            yield _told(plan, **{key: getattr(told, key) - 1})
        yield _told(plan, kept=())
        yield _told(plan, kept=("rollout.runtime",))


@mutant("trajectory")
def pieces_in_another_order(plan: Plan) -> Iterator[Plan]:
    if told := plan.summary.trajectories:
        for role, names in told.pieces.items():
            yield _told(plan, pieces={**told.pieces, role: names[::-1]})
            yield _told(plan, pieces={**told.pieces, role: names[:-1]})
        yield _told(plan, pieces={})


@mutant("trajectory")
def turns_of_another_plan(plan: Plan) -> Iterator[Plan]:
    """One turn, and the summary has several."""
    if plan.summary.trajectories is None:
        yield summarise(plan, trajectories=Trajectories(turns=2, tokens=64, kept=("rollout.kv",), pieces={}))


@mutant("trajectory")
def job_with_other_turns(plan: Plan) -> Iterator[Plan]:
    if told := plan.summary.trajectories:
        yield with_job(plan, "workload", "turns", "count", value=told.turns + 1)
        yield with_job(plan, "workload", "turns", value=None)
        yield with_job(
            plan, "workload", "turns", "observation_tokens", value=plan.job["workload"]["response_tokens"] + 1
        )


@mutant("times")
def times_of_other_turns(plan: Plan) -> Iterator[Plan]:
    times = plan.summary.times
    for i, turn in enumerate(times.turns):
        for key in ("decode_s", "prefix_s", "interference_s"):
            longer = turn.model_copy(update={key: getattr(turn, key) + 0.5})
            turns = (*times.turns[:i], longer, *times.turns[i + 1 :])
            yield summarise(plan, times=times.model_copy(update={"turns": turns}))
    if times.turns:
        yield summarise(plan, times=times.model_copy(update={"turns": times.turns[:-1]}))
        yield summarise(plan, times=times.model_copy(update={"turns": ()}))
        yield summarise(plan, times=times.model_copy(update={"environment_s": times.environment_s + 1}))


@mutant("trajectory")
def piece_of_one_trajectory(plan: Plan) -> Iterator[Plan]:
    """A later piece has the bytes of a prompt's, not of every trajectory."""
    told = plan.summary.trajectories
    for name in (n for names in told.pieces.values() for n in names[1:]) if told else ():
        yield with_object(plan, name, bytes=plan.object(name).bytes // plan.job["workload"]["group"])


# ---- the graph


@mutant("trajectory")
def history_of_other_responses(plan: Plan) -> Iterator[Plan]:
    rollouts = [r.name for r in plan.graph if r.op == "rx.generate"]
    for r in (r for r in plan.graph if r.kwargs.get("returns") == "history"):
        for other in (n for n in rollouts if n != r.args[2]["ref"]):
            yield _record(plan, r, args=(*r.args[:2], {"ref": other}))


@mutant("trajectory")
def boundary_that_extends_another(plan: Plan) -> Iterator[Plan]:
    prefixes = [r.name for r in plan.graph if r.op == "rx.prefix"]
    for r in (r for r in plan.graph if r.op == "rx.prefix" and len(r.args) > 2):
        for other in (n for n in prefixes if n not in (r.args[2]["ref"], r.name)):
            yield _record(plan, r, args=(*r.args[:2], {"ref": other}))


@mutant("graph")
def boundary_that_extends_none(plan: Plan) -> Iterator[Plan]:
    for r in (r for r in plan.graph if r.op == "rx.prefix" and len(r.args) > 2):
        yield _record(plan, r, args=r.args[:2])


@mutant("trajectory")
def responses_behind_another_history(plan: Plan) -> Iterator[Plan]:
    rollouts = [r.name for r in plan.graph if r.op == "rx.generate"]
    for r in (r for r in plan.graph if r.op == "rx.suffix" and len(rollouts) > 1):
        for other in (n for n in rollouts if n != r.args[2]["ref"]):
            yield _record(plan, r, args=(*r.args[:2], {"ref": other}))


@mutant("asked")
def history_sampled_several_times(plan: Plan) -> Iterator[Plan]:
    for r in (r for r in plan.graph if r.op == "rx.generate" and r.kwargs["n"] == 1):
        yield _record(plan, r, kwargs={"n": plan.job["workload"]["group"]})


# ---- the programs


@mutant("not-produced")
def kv_released_between_turns(plan: Plan) -> Iterator[Plan]:
    for process, i, step in _later(plan, "generate"):
        again = (Unmap(window=step.window, object="rollout.kv"), Map(window=step.window, object="rollout.kv"))
        yield insert(plan, process, i, *again)


@mutant("trajectory")
def turn_that_forgets_its_kv(plan: Plan) -> Iterator[Plan]:
    for process, i, step in _later(plan, "generate"):
        yield put(plan, process, i, change(step, reads=without(step.reads, "rollout.kv")))
        yield put(plan, process, i, change(step, writes=without(step.writes, "rollout.kv")))


@mutant("boundary-moved")
def piece_released_before_a_later_turn(plan: Plan) -> Iterator[Plan]:
    for process, i, step in _later(plan, "prefix"):
        for name in set(_pieces(plan)) & set(step.reads):
            yield insert(plan, process, i, Unmap(window=step.window, object=name))


@mutant("task-objects")
def turn_that_forgets_a_piece(plan: Plan) -> Iterator[Plan]:
    for process, i, step in _later(plan, "prefix", "suffix", "train", "prefix_backward"):
        own = {n for _, _, s in steps(plan, Run) if s.task == "prefix" and s.node == step.node for n in s.writes}
        for name in sorted(set(_pieces(plan)) & set(step.reads) - own):
            yield put(plan, process, i, unlist(step, name))


@mutant("trajectory")
def piece_written_by_another_turn(plan: Plan) -> Iterator[Plan]:
    for process, i, step in _later(plan, "prefix"):
        for name in sorted(set(_pieces(plan)) & set(step.reads)):
            yield put(plan, process, i, change(step, writes=(*step.writes, name)))


@mutant("task-order")
def earlier_piece_backward_first(plan: Plan) -> Iterator[Plan]:
    """The gradient of a piece lacks what later pieces add to it."""
    runs = [(p, i, s) for p, i, s in steps(plan, Run) if s.task == "prefix_backward"]
    for (process, i, first), (_, j, second) in pairwise(runs):
        if (first.role, first.microbatch) == (second.role, second.microbatch):
            yield move(plan, process, j, i)


@mutant("task-order")
def backward_before_the_last_turn(plan: Plan) -> Iterator[Plan]:
    trains = [(p, i, s) for p, i, s in steps(plan, Run) if s.task == "train"]
    for (process, i, first), (_, j, second) in pairwise(trains):
        if (first.role, first.microbatch) == (second.role, second.microbatch):
            backward = (b for _, b, s in steps(plan, Run) if s.task == "prefix_backward" and b > j)
            yield move(plan, process, next(backward), i)


@mutant("microbatch")
def work_of_another_turn(plan: Plan) -> Iterator[Plan]:
    nodes = {(s.task, s.role, s.node) for _, _, s in steps(plan, Run)}
    for process, i, step in _later(plan, "prefix", "suffix", "train", "prefix_backward"):
        for node in sorted(n for t, r, n in nodes if (t, r) == (step.task, step.role) and n != step.node):
            yield put(plan, process, i, change(step, node=node))


@mutant("missing-value")
def observed_before_the_turn_ends(plan: Plan) -> Iterator[Plan]:
    """The environment answers a response that the engine has not sent yet."""
    observed = {r.name for r in plan.graph if r.kwargs.get("returns") == "history"}
    waits = [(p, i) for p, i, _ in steps(plan, Wait)]
    for process, i, step in steps(plan, Run):
        if step.node in observed:
            before = max(j for p, j in waits if p == process and j < i)
            yield move(plan, process, i, before)


@mutant("missing-value")
def turn_that_does_not_wait(plan: Plan) -> Iterator[Plan]:
    observed = {r.name for r in plan.graph if r.kwargs.get("returns") == "history"}
    for process, i, step in steps(plan, Wait):
        if step.event in observed and process != "controller":
            yield put(plan, process, i)
